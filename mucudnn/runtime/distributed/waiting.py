"""Collectives that say how long this process stood in them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from mucudnn.runtime.distributed.collectives import Collectives, Pending

__all__ = ["Stopwatch", "TimedCollectives"]

T = TypeVar("T")


class Stopwatch:
    """Adds up what is spent within it.

    Args:
        now: A clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._spent = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around what counts."""
        began = self._now()
        try:
            yield
        finally:
            self._spent += self._now() - began

    def read_ms(self) -> float:
        """What was spent since this was asked last."""
        spent, self._spent = self._spent, 0.0
        return 1e3 * spent


class TimedCollectives:
    """Collectives of another, timed.

    A step takes what it takes by itself, and then it waits for slower ranks; to tell
    these apart, what is spent here is taken from the time of a step.

    Args:
        upstream: Does it.
        now: A clock in seconds.
    """

    def __init__(
        self, upstream: Collectives, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._upstream = upstream
        self._waited = Stopwatch(now)
        self.rank: int = upstream.rank
        self.size: int = upstream.size

    def waited_ms(self) -> float:
        """Since this was asked last."""
        return self._waited.read_ms()

    def all_reduce(self, array: Any) -> Pending:
        """Begin to sum arrays of one shape, in place."""
        with self._waited.running():
            return _Timed(self._upstream.all_reduce(array), self._waited)

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Everybody's array becomes that of one process."""
        with self._waited.running():
            self._upstream.broadcast(array, root)

    def all_gather(self, value: T) -> list[T]:
        """What each process says."""
        with self._waited.running():
            return self._upstream.all_gather(value)

    def barrier(self) -> None:
        """Return when all are here."""
        with self._waited.running():
            self._upstream.barrier()

    def abort(self, message: str) -> NoReturn:
        """End all of them."""
        self._upstream.abort(message)


class _Timed:
    """A collective that was begun."""

    def __init__(self, pending: Pending, waited: Stopwatch) -> None:
        self._pending = pending
        self._waited = waited

    def wait(self) -> None:
        with self._waited.running():
            self._pending.wait()
