"""A bound schedule: calls in order, and what each of them does to memory."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from mucudnn.backends.base import Buffer
from mucudnn.runtime.executor.hazards import ByteRange, Pending, PendingCopy

__all__ = ["Call", "Program", "Task", "Watcher"]

Call = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Task:
    """One call of a program, and what it does to memory.

    Attributes:
        label: The instruction that it is for.
        call: Does it.
        node: The node that it computes.
        reads: Bytes that it reads.
        writes: Bytes that it writes.
        copy: The copy that it starts.
        after: The copies that this one is told to wait for.
        waits_for: The copy that it waits for.
    """

    label: str
    call: Call
    node: str | None = None
    reads: tuple[ByteRange, ...] = ()
    writes: tuple[ByteRange, ...] = ()
    copy: PendingCopy | None = None
    after: tuple[int, ...] = ()
    waits_for: int | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule as calls.

    Attributes:
        tasks: In order.
        before: Copies of the step before that may be running when it begins.
        copies: How many it starts.
    """

    tasks: tuple[Task, ...]
    before: tuple[PendingCopy, ...]
    copies: int

    def touching(self, written: Iterable[ByteRange]) -> tuple[int, ...]:
        """What to wait for to write some bytes before a step: copies by their calls."""
        known = Pending(self.before)
        found = (copy for touched in written for copy in known.touching(touched))
        last = Pending.last_of_each_lane(found)
        return tuple(copy.number + self.copies for copy in last)


class Watcher(Protocol):
    """Told of every task of every step, to find those that come too early."""

    def begin(self, program: Program, written: tuple[ByteRange, ...]) -> None:
        """A step begins; so many bytes were written before it."""
        ...

    def before(self, task: Task) -> None:
        """A task is about to be called."""
        ...

    def overwrite(self, memory: Buffer) -> None:
        """Memory is allocated or freed: whoever reads it as it is, makes a mistake."""
        ...
