"""Collective operations that measure how long this process waits in them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from mucudnn.runtime.distributed.collectives import Collectives, Pending

__all__ = ["Stopwatch", "TimedCollectives"]

T = TypeVar("T")


class Stopwatch:
    """A clock that adds up the time spent in its `running` blocks."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._spent = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the enclosed block."""
        began = self._now()
        try:
            yield
        finally:
            self._spent += self._now() - began

    def read_ms(self) -> float:
        """Return the milliseconds since the last call, and reset."""
        spent, self._spent = self._spent, 0.0
        return 1e3 * spent


class TimedCollectives:
    """Collectives that measure the waiting time of an upstream implementation.

    A slow step and waiting for slower ranks look the same from outside. The waiting
    time measured here is subtracted from the time of a step.
    """

    def __init__(
        self, upstream: Collectives, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._upstream = upstream
        self._waited = Stopwatch(now)
        self.rank: int = upstream.rank
        self.size: int = upstream.size

    def waited_ms(self) -> float:
        """Return the milliseconds waited since the last call."""
        return self._waited.read_ms()

    def all_reduce(self, array: Any) -> Pending:
        """Start to sum arrays of one shape over all ranks, in place."""
        with self._waited.running():
            return _Timed(self._upstream.all_reduce(array), self._waited)

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Overwrite the array on all ranks with that of `root`."""
        with self._waited.running():
            self._upstream.broadcast(array, root)

    def all_gather(self, value: T) -> list[T]:
        """Return the value of each rank."""
        with self._waited.running():
            return self._upstream.all_gather(value)

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        with self._waited.running():
            self._upstream.barrier()

    def abort(self, message: str) -> NoReturn:
        """End all ranks."""
        self._upstream.abort(message)


class _Timed:
    def __init__(self, pending: Pending, waited: Stopwatch) -> None:
        self._pending = pending
        self._waited = waited

    def wait(self) -> None:
        with self._waited.running():
            self._pending.wait()
