"""Run jobs ahead of time on threads, and return the results in order.

Worker threads claim jobs in order from a board and put results on it. The consumer
takes results in order, and each one taken lets another job be claimed, so that a
limited number of jobs is ahead. The consumer is a generator: however it ends
(exhaustion, `break`, an exception, Ctrl-C, garbage collection), its `finally` closes
the board and joins the workers. Workers reference the board but not the generator, so
that it can be collected while they run. A forked process has no workers: there the
generator runs the remaining jobs itself.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

__all__ = ["in_order"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Done(Generic[T]):
    value: T

    def get(self) -> T:
        return self.value


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException

    def get(self) -> NoReturn:
        raise self.error


class _Board(Generic[T]):
    """Claimed jobs and their results; at most `ahead` jobs are claimed, not taken."""

    def __init__(self, jobs: Sequence[int], ahead: int) -> None:
        self._jobs = jobs
        self._claimable = ahead
        self._claimed = 0
        self._results: dict[int, _Done[T] | _Failed] = {}
        self._changed = threading.Condition()

    def claim(self) -> int | None:
        """Wait until a job may be claimed and return it; None if none is left."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._claimed < self._claimable or self._claimed >= len(self._jobs)
                )
            )
            if self._claimed >= len(self._jobs):
                return None
            self._claimed += 1
            return self._jobs[self._claimed - 1]

    def put(self, job: int, result: _Done[T] | _Failed) -> None:
        """Store a result; after a failed one no more jobs are claimed."""
        with self._changed:
            self._results[job] = result
            if isinstance(result, _Failed):
                self._jobs = self._jobs[: self._claimed]
            self._changed.notify_all()

    def take(self, job: int) -> _Done[T] | _Failed:
        """Wait for a result, remove it, and allow another job to be claimed."""
        with self._changed:
            self._changed.wait_for(lambda: job in self._results)
            self._claimable += 1
            self._changed.notify_all()
            return self._results.pop(job)

    def close(self) -> None:
        with self._changed:
            self._jobs = self._jobs[: self._claimed]
            self._changed.notify_all()


def in_order(
    make: Callable[[int], T], jobs: Sequence[int], *, workers: int, depth: int
) -> Iterator[T]:
    """Yield `make(job)` of every job, in order, made by `workers` threads.

    Args:
        make: Function of a job, called on several threads at once.
        jobs: Distinct jobs.
        workers: Number of threads; 0 makes each result on demand on the caller's
            thread.
        depth: Number of results ahead of the caller, at least one per worker.

    Yields:
        The results. An exception of `make` is raised in place of its result, with its
        own traceback.
    """
    if workers == 0:
        yield from map(make, jobs)
        return
    process = os.getpid()
    board = _Board[T](jobs, max(depth, workers))
    threads = list[threading.Thread]()
    try:
        for number in range(workers):
            # Daemon threads, as an open generator must not keep a script from ending.
            thread = threading.Thread(
                target=_work,
                args=(board, make),
                name=f"mucudnn-data-{number}",
                daemon=True,
            )
            thread.start()
            threads.append(thread)
        for job in jobs:
            # Not assigned to a name, which would keep a batch that the caller drops.
            if os.getpid() == process:
                yield board.take(job).get()
            else:
                yield make(job)
    finally:
        if os.getpid() == process:  # in a fork, a worker may have held the lock
            board.close()
            # The garbage collector may run this on a worker, which cannot join itself.
            if threading.current_thread() not in threads:
                for thread in threads:
                    thread.join()


def _work(board: _Board[T], make: Callable[[int], T]) -> None:
    while (job := board.claim()) is not None:
        try:
            board.put(job, _Done(make(job)))
        except BaseException as e:  # the consumer raises it
            board.put(job, _Failed(e))
