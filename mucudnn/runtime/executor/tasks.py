"""A bound schedule: calls in order, what each does to memory, and what it waits for.

Copies of one lane, which is a direction of a tier, follow one another, and each begins
after the computations that were launched before it. What is left are copies that a
later toucher of the same bytes has to wait for: those still running, as far as the
program knows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mucudnn.backends.base import Buffer, Kernel, KernelArguments
from mucudnn.ir.graph import Graph
from mucudnn.passes.placement.page_table import Extent

__all__ = [
    "DEVICE",
    "Around",
    "ByteRange",
    "Call",
    "Joinable",
    "Pending",
    "PendingCopy",
    "Program",
    "Surrounding",
    "Task",
    "Watcher",
    "WhileRunning",
]

Call = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Around:
    """Calls around those of nodes.

    Attributes:
        before: Node -> what is called before it.
        after: Node -> what is called after it.
    """

    before: Mapping[str, tuple[Call, ...]]
    after: Mapping[str, tuple[Call, ...]]

    def then(self, other: "Around") -> "Around":
        """These calls, and behind them those of another."""
        return Around(
            _joined(self.before, other.before), _joined(self.after, other.after)
        )


def _joined(
    one: Mapping[str, tuple[Call, ...]], other: Mapping[str, tuple[Call, ...]]
) -> Mapping[str, tuple[Call, ...]]:
    return {
        name: (*one.get(name, ()), *other.get(name, ()))
        for name in dict.fromkeys((*one, *other))
    }


WhileRunning = Callable[[str, str], Any]
"""(node, tensor that it touches) -> the tensor's array while the node runs: between
two nodes it may have been elsewhere, and come back to another place."""

Surrounding = Callable[[Graph, WhileRunning], Around]
"""(graph, where tensors are) -> what is called around its nodes."""

DEVICE = "device"
"""The space of the arena; other spaces are tiers of the host."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes of a storage, on the device or on the host.

    Attributes:
        space: Which memory.
        start: First byte.
        stop: The byte after the last.
        storage: Whose they are; empty if nobody's.
        pieces: Where they are, if `start` and `stop` are addresses of mapped memory.
    """

    space: str
    start: int
    stop: int
    storage: str
    pieces: tuple[Extent, ...] = ()

    def overlaps(self, other: "ByteRange") -> bool:
        """Whether both have a byte in common."""
        if self.space != other.space:
            return False
        if not (self.pieces or other.pieces):
            return self.start < other.stop and other.start < self.stop
        return any(
            mine.start < its.stop and its.start < mine.stop
            for mine in self.pieces or (Extent(self.start, self.stop),)
            for its in other.pieces or (Extent(other.start, other.stop),)
        )


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A copy that was started and not waited for.

    Attributes:
        number: Ascending in program order; negative if of the step before.
        lane: Its direction, `out` or `back`, and the number of a tier but the first.
        label: Its instruction, for messages.
        source: What it reads.
        target: What it writes.
    """

    number: int
    lane: str
    label: str
    source: ByteRange
    target: ByteRange


class Pending:
    """Copies in flight at one point of a program."""

    def __init__(self, copies: Iterable[PendingCopy] = ()) -> None:
        self._copies = list(copies)

    def __iter__(self) -> Iterator[PendingCopy]:
        return iter(self._copies)

    def add(self, copy: PendingCopy) -> None:
        """A copy was started."""
        self._copies.append(copy)

    def has(self, number: int) -> bool:
        """Whether a copy may still be running."""
        return any(copy.number == number for copy in self._copies)

    def waited(self, done: PendingCopy) -> None:
        """A copy has been waited for, and with it those before it in its lane."""
        self._copies = [
            copy
            for copy in self._copies
            if copy.lane != done.lane or copy.number > done.number
        ]

    def writing(self, touched: ByteRange) -> list[PendingCopy]:
        """Those that a reader of some bytes has to wait for."""
        return [copy for copy in self._copies if copy.target.overlaps(touched)]

    def touching(self, touched: ByteRange) -> list[PendingCopy]:
        """Those that a writer of some bytes has to wait for."""
        return [
            copy
            for copy in self._copies
            if copy.target.overlaps(touched) or copy.source.overlaps(touched)
        ]

    @staticmethod
    def last_of_each_lane(copies: Iterable[PendingCopy]) -> list[PendingCopy]:
        """All that need be waited for to have waited for all of them."""
        last: dict[str, PendingCopy] = {}
        for copy in copies:
            known = last.get(copy.lane)
            if known is None or known.number < copy.number:
                last[copy.lane] = copy
        return list(last.values())


@dataclass(frozen=True, slots=True)
class Joinable:
    """What a task launches, for its kernel to launch with that of others.

    Attributes:
        kernel: Of its operation.
        arguments: As `Kernel.run` takes them.
        reads: Storages that it reads, but for flags.
        writes: Storages that it writes, but for flags.
    """

    kernel: Kernel
    arguments: KernelArguments
    reads: frozenset[str]
    writes: frozenset[str]


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
        joinable: How it is launched with its neighbours, if it can be.
    """

    label: str
    call: Call
    node: str | None = None
    reads: tuple[ByteRange, ...] = ()
    writes: tuple[ByteRange, ...] = ()
    copy: PendingCopy | None = None
    after: tuple[int, ...] = ()
    waits_for: int | None = None
    joinable: Joinable | None = None


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
