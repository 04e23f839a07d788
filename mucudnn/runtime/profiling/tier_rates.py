"""How fast the links to tiers are, each way, where that is not given.

On the CPU links are measured, as training does. For a device that is not here, host
memory is reached at the rates of its costs, which are published figures of its link;
another device is taken to be as far away, as copies between two go over the same bus at
the worst; a folder is measured here, and no faster than that link. A rate that is given
counts before all of these.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from mucudnn.backends import get_backend
from mucudnn.backends.base import Device
from mucudnn.ir.profile import Profile
from mucudnn.ir.tensor import TensorSpec
from mucudnn.ir.tiers import MemoryTier
from mucudnn.runtime.executor.tier_choice import TierChoice
from mucudnn.runtime.profiling.cold_timing import LINK_BYTES, link_rates

__all__ = ["forecast_tiers", "measured_tiers", "tier_at"]

_HERE = "cpu"


def tier_at(
    choice: TierChoice, out_rate: float, in_rate: float, room: float | None = None
) -> MemoryTier:
    """A tier as planners see it, at rates in bytes a millisecond.

    `room` is how much of it there is, if that was looked up.
    """
    return MemoryTier(
        name=str(choice),
        nbytes=choice.room() if room is None else room,
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
    # The file that is measured with takes room itself: half of what is free at most.
    room = choice.room()
    spare = room / 2 if choice.kind == "disk" else room
    size = max(1, int(min(LINK_BYTES, memory, spare)))
    spec = TensorSpec("the link's buffer", (size,), "uint8")
    with closing(choice.open(device, size)) as tier:
        buffer = device.view(device.allocate(size), 0, spec)
        device.upload(np.zeros(spec.shape, np.uint8), buffer)
        return tier_at(choice, *link_rates(device, buffer, tier), room)


def forecast_tiers(
    choices: Sequence[TierChoice], profile: Profile, *, measured: bool
) -> tuple[MemoryTier, ...]:
    """Tiers as planners see them.

    Args:
        choices: Where tensors may go.
        profile: Of the step; its links are those to host memory.
        measured: Whether the step runs on this machine's CPU.

    Raises:
        ValueError: There is no such folder or device.
        OutOfMemoryError: There is no room to measure in.
    """
    here = get_backend(_HERE).device
    if measured:
        return measured_tiers(here, choices, LINK_BYTES)
    link = profile.out_bytes_per_ms, profile.in_bytes_per_ms
    return tuple(
        _slowed(measured_tiers(here, [choice], LINK_BYTES)[0], link)
        if choice.kind == "disk" and choice.bytes_per_ms is None
        else _at(choice, link)
        for choice in choices
    )


def _at(choice: TierChoice, link: tuple[float, float]) -> MemoryTier:
    """A tier at the rate that is given, or over a link."""
    given = choice.bytes_per_ms
    return tier_at(choice, *(link if given is None else (given, given)))


def _slowed(tier: MemoryTier, link: tuple[float, float]) -> MemoryTier:
    """A tier that is reached over a link."""
    return replace(
        tier,
        out_bytes_per_ms=min(tier.out_bytes_per_ms, link[0]),
        in_bytes_per_ms=min(tier.in_bytes_per_ms, link[1]),
    )
