"""Tasks of a bound schedule: calls, their effects, and batched launches.

Copies on one stream (a direction of a tier) run in order, and each begins after the
computations launched before it. A task thus only has to wait for copies of bytes that
it touches, as far as the program does not know them to be finished.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mucudnn.backends.base import Kernel, KernelArguments
from mucudnn.backends.device import Buffer
from mucudnn.ir.graph import Graph, Node
from mucudnn.passes.placement.layout import Extent

Call = Callable[[], None]


@dataclass(frozen=True, slots=True)
class NodeHooks:
    """Calls before and after those of nodes.

    Attributes:
        before: Node -> calls before it.
        after: Node -> calls after it.
    """

    before: Mapping[str, tuple[Call, ...]]
    after: Mapping[str, tuple[Call, ...]]

    def then(self, other: "NodeHooks") -> "NodeHooks":
        """Return these calls followed by those of `other`."""
        before, after = (
            {name: (*a.get(name, ()), *b.get(name, ())) for name in {**a, **b}}
            for a, b in ((self.before, other.before), (self.after, other.after))
        )
        return NodeHooks(before, after)


TensorLookup = Callable[[str, str], Any]
"""(node, tensor that it touches) -> the tensor's array while the node runs.
Between two nodes a tensor may be offloaded and fetched to another offset."""

HookFactory = Callable[[Graph, TensorLookup], NodeHooks]
"""(graph, tensor lookup) -> calls around the graph's nodes."""

DEVICE = "device"
"""Name of the arena's address space; other spaces are tiers of the host."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes of a storage, on the device or on the host.

    Attributes:
        space: Name of the address space.
        storage: Storage that the bytes belong to; empty for scratch memory.
        pieces: Physical extents, if `start` and `stop` are addresses of mapped memory.
    """

    space: str
    start: int
    stop: int
    storage: str
    pieces: tuple[Extent, ...] = ()

    def overlaps(self, other: "ByteRange") -> bool:
        """Return whether both ranges have a byte in common."""
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
        number: Ascending in program order; negative for copies of the previous step.
        stream: Direction (`out` or `back`), and the tier's index unless it is 0.
        label: The copy's instruction, for messages.
    """

    number: int
    stream: str
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
        """Add a copy that was started."""
        self._copies.append(copy)

    def has(self, number: int) -> bool:
        """Return whether a copy may still be running."""
        return any(copy.number == number for copy in self._copies)

    def waited(self, done: PendingCopy) -> None:
        """Remove a copy that was waited for, and earlier ones on its stream."""
        self._copies = [
            copy
            for copy in self._copies
            if copy.stream != done.stream or copy.number > done.number
        ]

    def writing(self, touched: ByteRange) -> list[PendingCopy]:
        """Return the copies that a reader of some bytes must wait for."""
        return [copy for copy in self._copies if copy.target.overlaps(touched)]

    def touching(self, touched: ByteRange) -> list[PendingCopy]:
        """Return the copies that a writer of some bytes must wait for."""
        return [
            copy
            for copy in self._copies
            if copy.target.overlaps(touched) or copy.source.overlaps(touched)
        ]

    @staticmethod
    def last_of_each_stream(copies: Iterable[PendingCopy]) -> list[PendingCopy]:
        """Return the last copy of each stream: waiting for them is enough."""
        last: dict[str, PendingCopy] = {}
        for copy in copies:
            known = last.get(copy.stream)
            if known is None or known.number < copy.number:
                last[copy.stream] = copy
        return list(last.values())


@dataclass(frozen=True, slots=True)
class Batchable:
    """A kernel call that can be batched with others of the same kernel.

    Attributes:
        reads: Storages that it reads, except flags.
        writes: Storages that it writes, except flags.
    """

    kernel: Kernel
    arguments: KernelArguments
    reads: frozenset[str]
    writes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Task:
    """One call of a program, and its effects on memory.

    Attributes:
        reads: Bytes that it reads.
        writes: Bytes that it writes.
        after: Numbers of the copies that its own copy waits for.
        waits_for: Number of the copy that it waits for.
        batchable: How it can be batched with adjacent tasks, if at all.
    """

    label: str
    call: Call
    node: str | None = None
    reads: tuple[ByteRange, ...] = ()
    writes: tuple[ByteRange, ...] = ()
    copy: PendingCopy | None = None
    after: tuple[int, ...] = ()
    waits_for: int | None = None
    batchable: Batchable | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule bound to calls.

    Attributes:
        tasks: Tasks in order of execution.
        before: Copies of the previous step that may be running when a step begins.
        copies: Number of copies that a step starts.
    """

    tasks: tuple[Task, ...]
    before: tuple[PendingCopy, ...]
    copies: int

    def touching(self, written: Iterable[ByteRange]) -> tuple[int, ...]:
        """Return numbers of copies to wait for before writing some bytes."""
        known = Pending(self.before)
        found = (copy for touched in written for copy in known.touching(touched))
        last = Pending.last_of_each_stream(found)
        return tuple(copy.number + self.copies for copy in last)


class Watcher(Protocol):
    """Test hook that is called at every task, to detect races."""

    def begin(self, program: Program, written: tuple[ByteRange, ...]) -> None:
        """Begin a step; `written` are the bytes that are initialized."""

    def before(self, task: Task) -> None:
        """Observe a task that is about to be called."""

    def overwrite(self, memory: Buffer) -> None:
        """Overwrite memory that is being allocated or freed."""


# Batch adjacent tasks of one operation into one launch, where the kernel can.
#
# Updating a hundred parameters takes a hundred small launches. Adjacent ones, with no
# copy and no wait between them, are passed to the kernel together. All their tensors
# are resident then, as a program waits before it touches anything. Tasks that touch
# what another of them writes are not batched.


def batchable(
    graph: Graph, node: Node, kernel: Kernel, arguments: KernelArguments
) -> Batchable | None:
    """Describe how a node is batched with others; None if its kernel cannot be."""
    if kernel.run_batched is None:
        return None
    flags = {node.inputs[i] for i in kernel.flags}
    storages = graph.storages
    reads = frozenset(storages[t] for t in node.inputs if t not in flags)
    written = (*node.outputs, *node.mutates)
    writes = frozenset(storages[t] for t in written if t not in flags)
    return Batchable(kernel, arguments, reads, writes)


def batch_launches(tasks: Iterable[Task]) -> list[Call]:
    """Return the calls of a program with adjacent launches batched."""
    calls: list[Call] = []
    run: list[Task] = []
    for task in tasks:
        if run and not _can_batch(run, task):
            calls += _launched(run)
            run = []
        run.append(task)
    return calls + _launched(run)


def _can_batch(run: Sequence[Task], task: Task) -> bool:
    """Return whether a task can be launched together with those before it."""
    new, known = task.batchable, [t.batchable for t in run]
    if new is None or known[0] is None or new.kernel is not known[0].kernel:
        return False
    return not any(
        new.writes & (old.reads | old.writes) or new.reads & old.writes
        for old in known
        if old is not None
    )


def _launched(run: Sequence[Task]) -> list[Call]:
    found = [task.batchable for task in run if task.batchable is not None]
    if len(found) < 2 or found[0].kernel.run_batched is None:
        return [task.call for task in run]
    return [found[0].kernel.run_batched([each.arguments for each in found])]
