"""How long the last steps took, by the device's own clock."""

import statistics
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from mucudnn.backends.base import Device, Event

__all__ = ["StepTimes", "Times"]

_REMEMBERED = 101

T = TypeVar("T")


class Times(Generic[T]):
    """What was noted of the last steps.

    Args:
        remembered: How many of them.
    """

    def __init__(self, remembered: int) -> None:
        self._noted: deque[T] = deque(maxlen=remembered)

    def add(self, noted: T) -> None:
        """One more step."""
        self._noted.append(noted)

    def median(self, ms: Callable[[T], float]) -> float:
        """In the middle, without the first unless it is the only one; 0 before any.

        Args:
            ms: How long a step took, from what was noted of it.
        """
        times = [ms(noted) for noted in self._noted]
        return statistics.median(times[1:] or times or [0.0])

    @property
    def last(self) -> T:
        """What was noted of the last one."""
        return self._noted[-1]


class StepTimes:
    """Times steps, and remembers some of them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._marks: Times[tuple[Event, Event]] = Times(_REMEMBERED)

    @property
    def median_ms(self) -> float:
        """Of what is remembered, without the first unless it is the only one.

        Waits for the last of them.
        """
        return self._marks.median(self._ms)

    @property
    def last_ms(self) -> float:
        """Of the last one, waited for."""
        return self._ms(self._marks.last)

    def timed(self, take: Callable[[], T]) -> tuple[T, float]:
        """Take a step; what came of it, and its ms."""
        start = self._device.record()
        found = take()
        return found, self._device.elapsed_ms(start, self._device.record())

    def remembered(self, take: Callable[[], T]) -> T:
        """Launch a step that is one of the last hundred; it is not waited for."""
        start = self._device.record()
        found = take()
        self._marks.add((start, self._device.record()))
        return found

    def _ms(self, marks: tuple[Event, Event]) -> float:
        return self._device.elapsed_ms(*marks)
