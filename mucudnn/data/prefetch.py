"""Work done ahead on threads, handed over in order.

Workers claim jobs in order from a board and pin results to it; the consumer takes
them in order and thereby lets more jobs be claimed, so at most a fixed number are
ahead of it. The consumer is a generator: however it ends (exhaustion, `break`, an
exception, Ctrl-C, garbage collection), its `finally` closes the board and waits for
the workers. Workers know the board and never the generator, so that it can be
collected while they live. A process that is forked meanwhile has no workers: there the
consumer makes what is left itself.
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
    """Which jobs are claimed, done and wanted; `ahead` may be claimed and not taken."""

    def __init__(self, jobs: Sequence[int], ahead: int) -> None:
        self._jobs = jobs
        self._claimable = ahead
        self._claimed = 0
        self._results: dict[int, _Done[T] | _Failed] = {}
        self._changed = threading.Condition()

    def claim(self) -> int | None:
        """The next job, once there is room; None when there is no more."""
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
        """Pin a result up; after a failed one no job is claimed any more."""
        with self._changed:
            self._results[job] = result
            if isinstance(result, _Failed):
                self._jobs = self._jobs[: self._claimed]
            self._changed.notify_all()

    def take(self, job: int) -> _Done[T] | _Failed:
        """Wait for a result, take it down and make room for another."""
        with self._changed:
            self._changed.wait_for(lambda: job in self._results)
            self._claimable += 1
            self._changed.notify_all()
            return self._results.pop(job)

    def close(self) -> None:
        """Let no job be claimed any more."""
        with self._changed:
            self._jobs = self._jobs[: self._claimed]
            self._changed.notify_all()


def in_order(
    make: Callable[[int], T], jobs: Sequence[int], *, workers: int, depth: int
) -> Iterator[T]:
    """`make(job)` of every job, in order, made by `workers` threads.

    Args:
        make: Called on several threads at once.
        jobs: Distinct.
        workers: 0 makes each result when it is asked for, on the caller's thread.
        depth: Results that may be ahead of the caller, at least one a worker.

    Yields:
        The results. What `make` raises is raised where its result would have been,
        with its own traceback.
    """
    if workers == 0:
        yield from map(make, jobs)
        return
    process = os.getpid()
    board = _Board[T](jobs, max(depth, workers))
    threads = list[threading.Thread]()
    try:
        for number in range(workers):
            # daemons: a generator left open must not keep a script from ending
            thread = threading.Thread(
                target=_work,
                args=(board, make),
                name=f"mucudnn-data-{number}",
                daemon=True,
            )
            thread.start()
            threads.append(thread)
        for job in jobs:
            # no name keeps what the caller drops
            if os.getpid() == process:
                yield board.take(job).get()
            else:
                yield make(job)
    finally:
        if os.getpid() == process:  # else a worker may have held the board's lock
            board.close()
            # the garbage collector may run this on a worker: it cannot wait for itself
            if threading.current_thread() not in threads:
                for thread in threads:
                    thread.join()


def _work(board: _Board[T], make: Callable[[int], T]) -> None:
    while (job := board.claim()) is not None:
        try:
            board.put(job, _Done(make(job)))
        except BaseException as e:  # the consumer waits for an answer, whatever it is
            board.put(job, _Failed(e))
