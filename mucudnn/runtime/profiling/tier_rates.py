"""Rates of the links to offload targets, where the user does not give them.

On the CPU, links are measured, as in training. For a device that is not present, the
rate to host memory is the published one of its profile. A peer device gets the same
rate, as in the worst case copies between devices use the same bus. A folder is measured
on this machine and limited to that rate. A rate given by the user takes precedence.
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
    """Return a tier for planning with rates in bytes a millisecond.

    `room` is its capacity in bytes; looked up if None.
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
    """Measure the links to offload targets; return tiers for planning.

    At most `memory` bytes of the device are allocated meanwhile.
    """
    return tuple(_measured(device, choice, memory) for choice in choices)


def _measured(device: Device, choice: TierChoice, memory: int) -> MemoryTier:
    if choice.bytes_per_ms is not None:
        return tier_at(choice, choice.bytes_per_ms, choice.bytes_per_ms)
    # The file for measuring takes room itself, so it uses half of the free space.
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
    """Estimate the links to offload targets; return tiers for planning.

    `profile` has the rates to host memory. Links are only `measured` where the step
    runs on this machine's CPU.
    """
    if measured:
        return measured_tiers(get_backend(_HERE).device, choices, LINK_BYTES)
    link = profile.out_bytes_per_ms, profile.in_bytes_per_ms
    return tuple(_forecast(choice, link) for choice in choices)


def _forecast(choice: TierChoice, link: tuple[float, float]) -> MemoryTier:
    if choice.bytes_per_ms is not None:
        return tier_at(choice, choice.bytes_per_ms, choice.bytes_per_ms)
    if choice.kind != "disk":
        return tier_at(choice, *link)
    (tier,) = measured_tiers(get_backend(_HERE).device, [choice], LINK_BYTES)
    return replace(
        tier,
        out_bytes_per_ms=min(tier.out_bytes_per_ms, link[0]),
        in_bytes_per_ms=min(tier.in_bytes_per_ms, link[1]),
    )
