"""How times and bytes are measured, by device."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from mucudnn.torch.measurement.cpu import CpuMeter
from mucudnn.torch.measurement.cuda import CudaMeter
from mucudnn.torch.measurement.links import Links

__all__ = ["Meter", "Prepared", "meter_of"]

Prepared = Callable[[], Callable[[], object]]
"""Makes what a call needs beforehand, which is not counted; the call."""


class Meter(Protocol):
    """Measures calls on one device."""

    def time_ms(self, call: Callable[[], object]) -> float:
        """The time of a call that has run before."""

    def most_bytes(self, calls: Sequence[Prepared]) -> list[int]:
        """The most that each call has in use of what it allocates, results included."""

    def links(self, prepared: Prepared) -> Links:
        """What copies to the host and back cost beside a call."""


def meter_of(device: torch.device) -> Meter:
    """What measures on a device."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()
