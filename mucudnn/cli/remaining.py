"""Estimate the remaining time of work from the time so far.

Parts of work differ, so the estimate is rounded, and made only after the first part.
"""

import math
import time
from collections.abc import Callable

__all__ = ["Remaining", "left_text"]

_LEAST_S = 3.0
"""Seconds of work below which there is no estimate."""

_STEPS_S = ((55, 10), (3600, 60), (36000, 600), (math.inf, 3600))
"""(below so many seconds, rounded to so many)."""


class Remaining:
    """An estimate of the remaining time of work with countable parts."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        limit_s: float | None = None,
    ) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._start = clock()
        self._of: tuple[str, int] | None = None
        self._first = self._done = 0
        self._since = self._last = self._start

    def at(self, done: int, total: int, *, title: str = "") -> None:
        """Record progress; another title or total starts other work."""
        now = self._clock()
        if self._of != (title, total) or done < self._done:
            self._of, self._first, self._since = (title, total), done, now
            self._last = now
        elif done > self._done:
            self._last = now
        self._done = done

    def left_s(self) -> float | None:
        """Return the remaining seconds; None if unknown."""
        now = self._clock()
        within = None if self._limit_s is None else self._limit_s - (now - self._start)
        parts, took = self._done - self._first, self._last - self._since
        if self._of is None or parts < 1 or took < _LEAST_S:
            return None if within is None else max(0.0, within)
        rest = self._of[1] - self._done
        each = took / parts
        after_this = each * max(0, rest - 1)
        left = max(each * rest - (now - self._last), after_this)
        return left if within is None else max(0.0, min(left, within))


def left_text(seconds: float | None) -> str:
    """Return text such as `about 2 min left`; empty if unknown, or over."""
    if seconds is None or seconds <= 0:
        return ""
    unit = next(unit for below, unit in _STEPS_S if seconds < below)
    whole = max(unit, round(seconds / unit) * unit)
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    parts = ((hours, "h"), (minutes, "min"), (rest, "s"))
    return f"about {' '.join(f'{n} {unit}' for n, unit in parts if n)} left"
