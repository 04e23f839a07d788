"""How long the last steps took, by the device's own clock."""

import statistics
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from mucudnn.backends.base import Device, Event

__all__ = ["StepTimes"]

_REMEMBERED = 101

T = TypeVar("T")


class StepTimes:
    """Times steps, and remembers some of them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._marks: deque[tuple[Event, Event]] = deque(maxlen=_REMEMBERED)

    @property
    def median_ms(self) -> float:
        """Of what is remembered, without the first unless it is the only one.

        Waits for the last of them.
        """
        times = [self._device.elapsed_ms(*marks) for marks in self._marks]
        return statistics.median(times[1:] or times or [0.0])

    @property
    def last_ms(self) -> float:
        """Of the last one, waited for."""
        return self._device.elapsed_ms(*self._marks[-1])

    def timed(self, take: Callable[[], T]) -> tuple[T, float]:
        """Take a step; what came of it, and its ms."""
        start = self._device.record()
        found = take()
        return found, self._device.elapsed_ms(start, self._device.record())

    def remembered(self, take: Callable[[], T]) -> T:
        """Launch a step that is one of the last hundred; it is not waited for."""
        start = self._device.record()
        found = take()
        self._marks.append((start, self._device.record()))
        return found
