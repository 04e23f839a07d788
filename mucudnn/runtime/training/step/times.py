"""Time steps by the device's own clock."""

import statistics
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from mucudnn.backends.base import Device, Event

__all__ = ["StepTimes", "Times"]

_REMEMBERED = 101

T = TypeVar("T")


class Times(Generic[T]):
    """Records of the most recent steps."""

    def __init__(self, capacity: int) -> None:
        self._noted: deque[T] = deque(maxlen=capacity)

    def add(self, noted: T) -> None:
        """Add the record of a step."""
        self._noted.append(noted)

    def median(self, ms: Callable[[T], float]) -> float:
        """Return the median time, without the first step if there are others; or 0.

        `ms` returns the time of a record.
        """
        times = [ms(noted) for noted in self._noted]
        return statistics.median(times[1:] or times or [0.0])

    @property
    def last(self) -> T:
        """Record of the last step."""
        return self._noted[-1]


class StepTimes:
    """Times steps, and keeps the most recent ones."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._marks: Times[tuple[Event, Event]] = Times(_REMEMBERED)

    @property
    def median_ms(self) -> float:
        """Median of recent steps without the first; waits for the last of them."""
        return self._marks.median(self._ms)

    @property
    def last_ms(self) -> float:
        """Time of the last step; waits for the step."""
        return self._ms(self._marks.last)

    def timed(self, take: Callable[[], T]) -> tuple[T, float]:
        """Take a step; return its result and its ms."""
        start = self._device.record()
        found = take()
        return found, self._device.elapsed_ms(start, self._device.record())

    def recorded(self, take: Callable[[], T]) -> T:
        """Launch a step and keep its time; does not wait for the step."""
        start = self._device.record()
        found = take()
        self._marks.add((start, self._device.record()))
        return found

    def _ms(self, marks: tuple[Event, Event]) -> float:
        return self._device.elapsed_ms(*marks)
