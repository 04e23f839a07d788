"""How long the last steps took, by the device's own clock."""

import statistics
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from mucudnn.backends.base import Device

__all__ = ["StepTimes"]

_REMEMBERED = 101

T = TypeVar("T")


class StepTimes:
    """Times steps, and remembers some of them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._times: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def median_ms(self) -> float:
        """Of what is remembered, without the first unless it is the only one."""
        times = list(self._times)
        return statistics.median(times[1:] or times or [0.0])

    def timed(self, take: Callable[[], T]) -> tuple[T, float]:
        """Take a step; what came of it, and its ms."""
        start = self._device.record()
        found = take()
        return found, self._device.elapsed_ms(start, self._device.record())

    def remember(self, ms: float) -> None:
        """Count one, of the last hundred."""
        self._times.append(ms)
