"""Simulated copies: the clocks of two copy engines."""

from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from mucudnn.backends.device import Start, Way
from mucudnn.errors import BackendError

__all__ = ["Clock", "VirtualCopier"]


class Clock:
    """Virtual time of the compute queue in ms, exact as a fraction."""

    def __init__(self) -> None:
        self.now = Fraction(0)

    def wait_until(self, then: Fraction) -> None:
        """Advance to a moment, unless it is in the past."""
        self.now = max(self.now, then)


class VirtualCopier:
    """Two copy engines with a queue each; a ticket is the end time of its copy."""

    def __init__(
        self, clock: Clock, out_bytes_per_ms: Fraction, in_bytes_per_ms: Fraction
    ) -> None:
        self._clock = clock
        self._out = _Engine(clock, out_bytes_per_ms)
        self._in = _Engine(clock, in_bytes_per_ms)
        self._closed = False

    def out(self, source: Any, target: Any, after: Sequence[Fraction] = ()) -> Fraction:
        """Simulate a copy to the host."""
        self._check(source, target)
        return self._out.copy(source.nbytes, after)

    def back(
        self, source: Any, target: Any, after: Sequence[Fraction] = ()
    ) -> Fraction:
        """Simulate a copy from the host."""
        self._check(source, target)
        return self._in.copy(source.nbytes, after)

    def bound(self, way: Way, source: Any, target: Any) -> Start:
        """Return a function that simulates this copy."""
        return partial(self.out if way == "out" else self.back, source, target)

    def wait(self, ticket: Fraction) -> None:
        """Advance the clock to the end of the copy."""
        self._clock.wait_until(ticket)

    def finish(self) -> None:
        """Advance the clock to the end of both queues."""
        self._clock.wait_until(self._out.free)
        self._clock.wait_until(self._in.free)

    def close(self) -> None:
        """Refuse further copies."""
        self._closed = True

    def _check(self, source: Any, target: Any) -> None:
        if self._closed:
            raise BackendError("a copy was asked of a closed copier")
        if source.nbytes != target.nbytes:
            raise BackendError(
                f"a copy of {source.nbytes} bytes was given {target.nbytes}"
            )


class _Engine:
    def __init__(self, clock: Clock, bytes_per_ms: Fraction) -> None:
        self.free = Fraction(0)
        self._clock = clock
        self._rate = bytes_per_ms

    def copy(self, nbytes: int, after: Sequence[Fraction]) -> Fraction:
        start = max(self._clock.now, self.free, *after)
        self.free = start + nbytes / self._rate
        return self.free
