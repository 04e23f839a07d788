"""Tasks of a bound schedule: calls, their effects, and batched launches.

Copies on one stream (a direction of a tier) run in order, and each begins after the
computations launched before it. A task thus only has to wait for copies of bytes that
it touches, as far as the program does not know them to be finished.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from mucudnn.backends.base import Kernel, KernelArguments
from mucudnn.backends.device import Array, Buffer, Copier, Start, Way
from mucudnn.ir.graph import Graph, Node
from mucudnn.passes.placement.layout import Extent

Call = Callable[[], None]


@dataclass(frozen=True, slots=True)
class NodeHooks:
    """Additional calls before and after the calls of nodes.

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
        # Tensors at different mapped addresses may share chunks: compare those instead.
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
    # All updates set the same overflow flag to the same value: no conflict.
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


# Start and wait for the copies of a step, by number; abandon them after an error.
#
# A number refers to the last copy started under it, in this step or the one before.
# Waiting for a number without a copy returns at once.


class Copies:
    """The copy engines of all tiers, opened on first use, and the tickets of a step."""

    def __init__(self, copiers: Sequence[Callable[[], Copier]]) -> None:
        self._open = tuple(copiers)
        self._copiers: dict[int, Copier] = {}
        self._used: set[int] = set()
        self._tickets: dict[int, tuple[Copier, Any]] = {}
        self._latest: dict[tuple[str, int], tuple[Copier, Any]] = {}

    def bound(
        self,
        way: Way,
        number: int,
        source: Array,
        target: Array,
        after: Sequence[int],
        link: int = 0,
    ) -> Call:
        """Return a call that starts copy `number` after the copies `after`."""
        tickets, latest, stream = self._tickets, self._latest, (way, link)
        copiers = self._copiers
        made: list[tuple[Copier, Start]] = []

        def start() -> None:
            copier = copiers.get(link) or self._opened(link)
            # After an error the copier is another one, for which the copy is prepared
            # anew.
            if not made or made[0][0] is not copier:
                made[:] = [(copier, copier.prebind(way, source, target))]
            behind = [tickets[i][1] for i in after if i in tickets]
            tickets[number] = latest[stream] = copier, made[0][1](behind)

        return start

    def wait(self, number: int) -> None:
        """Make the compute stream wait for a copy."""
        if number in self._tickets:
            copier, ticket = self._tickets[number]
            copier.wait(ticket)

    @contextmanager
    def of_a_step(self, *, carries: bool = False, waits: bool = True) -> Iterator[None]:
        """Finish all copies started within the block, or abandon them on an error.

        After an error, Ctrl-C included, no copy touches the step's memory any more.

        Args:
            carries: Whether copies may continue into the next step.
            waits: Whether the host waits for the copies; otherwise the compute stream
                does.
        """
        try:
            yield
            if not carries and waits:
                self.finish()
            elif not carries:
                self.settle()
        except BaseException:
            self.close()
            raise

    def settle(self) -> None:
        """Make the compute stream wait for all copies."""
        # The last copy of each stream is enough, as copies of one stream run in order.
        for copier, ticket in self._latest.values():
            copier.wait(ticket)
        self._tickets.clear()
        self._latest.clear()

    def finish(self) -> None:
        """Wait on the host for all copies, those in captured graphs included."""
        # A captured graph still copies after the engine that it was captured from was
        # closed.
        for link in self._used:
            self._opened(link).finish()
        self._tickets.clear()
        self._latest.clear()

    def close(self) -> None:
        """Wait for running copies, drop the rest; the next step opens new engines."""
        copiers = list(self._copiers.values())
        self._copiers.clear()
        self._tickets.clear()
        self._latest.clear()
        for copier in copiers:
            copier.close()

    def _opened(self, link: int) -> Copier:
        if link not in self._copiers:
            self._used.add(link)
            self._copiers[link] = self._open[link]()
        return self._copiers[link]
