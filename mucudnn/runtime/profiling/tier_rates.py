"""Measure how fast the links to tiers are, each way, where that is not given."""

from collections.abc import Sequence
from contextlib import closing

import numpy as np

from mucudnn.backends.base import Device
from mucudnn.ir.tensor import TensorSpec
from mucudnn.ir.tiers import MemoryTier
from mucudnn.runtime.executor.tier_choice import TierChoice
from mucudnn.runtime.profiling.cold_timing import LINK_BYTES, link_rates

__all__ = ["measured_tiers", "tier_at"]


def tier_at(choice: TierChoice, out_rate: float, in_rate: float) -> MemoryTier:
    """A tier as planners see it, at rates in bytes a millisecond."""
    return MemoryTier(
        name=str(choice),
        nbytes=choice.room(),
        out_bytes_per_ms=out_rate,
        in_bytes_per_ms=in_rate,
        addressable=choice.addressable,
    )


def measured_tiers(
    device: Device, choices: Sequence[TierChoice], memory: int
) -> tuple[MemoryTier, ...]:
    """Tiers as planners see them.

    Args:
        device: From which tensors leave.
        choices: Where to.
        memory: Bytes of the device that may be taken meanwhile.

    Raises:
        ValueError: There is no such folder or device.
        OutOfMemoryError: There is no room to measure in.
        BackendUnavailableError: Such a tier cannot be had here.
    """
    return tuple(_measured(device, choice, memory) for choice in choices)


def _measured(device: Device, choice: TierChoice, memory: int) -> MemoryTier:
    if choice.bytes_per_ms is not None:
        return tier_at(choice, choice.bytes_per_ms, choice.bytes_per_ms)
    size = max(1, int(min(LINK_BYTES, memory, choice.nbytes)))
    spec = TensorSpec("the link's buffer", (size,), "uint8")
    with closing(choice.open(device, size)) as tier:
        buffer = device.view(device.allocate(size), 0, spec)
        device.upload(np.zeros(spec.shape, np.uint8), buffer)
        return tier_at(choice, *link_rates(device, buffer, tier))
