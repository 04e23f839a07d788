"""What may be away when, in a step of any residencies: the items of a relaxation.

A step is cut into windows of consecutive nodes. Whatever is decided, a storage is
there for the nodes that use it, and it is away, if at all, in the gaps between two
uses. Each gap is one absence: it is known in which windows it lies, and how the storage
can be back at its end. All of that follows from the training graph alone, before
anything is in place or computed again.
"""

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.profile import Profile
from mucudnn.passes.graph.recompute_chains import recompute_chain
from mucudnn.passes.graph.saved_tensors import saved_tensors
from mucudnn.passes.graph.slicing.rows import of_whole
from mucudnn.passes.liveness import Use, rounded, uses_of

__all__ = [
    "Absence",
    "Chains",
    "Windows",
    "absences_of",
    "bytes_of_operands",
    "phases_again",
    "windows_of",
]


@dataclass(frozen=True, slots=True)
class Windows:
    """Consecutive nodes of a step, in few groups.

    Attributes:
        starts: Position of the first node of each, ascending; the first is 0.
        count: Nodes of the step.
    """

    starts: tuple[int, ...]
    count: int

    def __len__(self) -> int:
        return len(self.starts)

    def of(self, position: int) -> int:
        """The window of a node; positions of the next step are like this one's."""
        return bisect_right(self.starts, position % max(1, self.count)) - 1

    def within(self, gap: "Absence", position: int) -> int:
        """Which of a gap's windows a node in it is in."""
        window = self.of(position)
        if position < self.count:
            return gap.windows.index(window)
        return len(gap.windows) - 1 - gap.windows[::-1].index(window)

    def between(self, first: int, last: int) -> tuple[int, ...]:
        """Windows from one node's to another's, which may be of the next step."""
        begin, end = self.of(first), self.of(last)
        if last < self.count:
            return tuple(range(begin, end + 1))
        return (*range(begin, len(self)), *range(end + 1))


@dataclass(frozen=True, slots=True)
class Absence:
    """A gap between two uses over which bytes may be away.

    Attributes:
        storage: Its name; of several that are alike, one of them.
        nbytes: Of all of them.
        after: Position of the use before the gap.
        before: Position of the use behind it, in the next step if it is `count` or
            more.
        windows: Those that the gap lies in, in order.
        clean: Whether the host has its bytes already: they need no copy out.
        stuck: Whether it cannot be copied at all.
        again: Windows in which it can be computed again.
    """

    storage: str
    nbytes: int
    after: int
    before: int
    windows: tuple[int, ...]
    clean: bool = False
    stuck: bool = False
    again: frozenset[int] = frozenset()


def windows_of(weights: Sequence[float], borders: Sequence[int], most: int) -> Windows:
    """Windows of about equal weight.

    Args:
        weights: Of every node.
        borders: Positions where windows begin in any case.
        most: How many there may be, besides.
    """
    total = sum(weights)
    starts = {0, *(at for at in borders if 0 < at < len(weights))}
    marks = itertools.accumulate(weights)
    quota = 1
    for position, mark in enumerate(marks):
        if total and mark >= quota * total / most and position + 1 < len(weights):
            starts.add(position + 1)
            quota = int(mark * most / total) + 1
    return Windows(tuple(sorted(starts)), len(weights))


def absences_of(
    graph: Graph, windows: Windows, moving: frozenset[str], least_bytes: float
) -> list[Absence]:
    """All absences worth a thought, of parameters and state those alike as one.

    Args:
        graph: A training graph that nothing has made in-place yet.
        windows: Of its nodes.
        moving: Parameters and state that may leave.
        least_bytes: Of storages; smaller ones may be away for nothing.
    """
    found: list[Absence] = []
    alike: dict[tuple[int, ...], list[Absence]] = {}
    for use in uses_of(graph).values():
        if use.persistent and use.storage in moving:
            for absence in _of_persistent(use, windows):
                key = (*absence.windows, windows.count * absence.clean)
                alike.setdefault(key, []).append(absence)
        elif not use.persistent and use.nbytes >= least_bytes:
            found += _of_activation(graph, use, windows)
    return [*found, *map(_together, alike.values())]


def _of_activation(graph: Graph, use: Use, windows: Windows) -> Iterator[Absence]:
    producer = graph.producers.get(use.storage)
    stuck = use.storage in graph.immovable
    for after, before in use.gaps():
        if before >= windows.count:
            continue
        crossed = windows.between(after, before)
        again: frozenset[int] = frozenset()
        if producer is not None and producer.remakes(use.storage):
            phases = phases_again(use.storage)
            if graph.nodes[before].phase in phases:
                again = frozenset(w for w in crossed if _any(graph, windows, w, phases))
        if again or not stuck:
            yield Absence(
                use.storage,
                use.nbytes,
                after,
                before,
                crossed,
                stuck=stuck,
                again=again,
            )


def phases_again(storage: str) -> tuple[Phase, ...]:
    """Before nodes of which phases something may be computed again: see `Residency`."""
    sliced = of_whole(storage) != storage
    return (Phase.FORWARD, Phase.BACKWARD) if sliced else (Phase.BACKWARD,)


def _any(
    graph: Graph, windows: Windows, window: int, phases: tuple[Phase, ...]
) -> bool:
    stop = [*windows.starts, windows.count][window + 1]
    nodes = graph.nodes[windows.starts[window] : stop]
    return any(node.phase in phases for node in nodes)


def _of_persistent(use: Use, windows: Windows) -> Iterator[Absence]:
    for after, before in use.gaps():
        clean = before < windows.count or not use.writes
        crossed = windows.between(after, before)
        yield Absence(use.storage, use.nbytes, after, before, crossed, clean=clean)


def _together(alike: Sequence[Absence]) -> Absence:
    """One absence for several in the same windows: there while all of them are."""
    return replace(
        alike[0],
        nbytes=sum(absence.nbytes for absence in alike),
        after=max(absence.after for absence in alike),
        before=min(absence.before for absence in alike),
    )


def bytes_of_operands(
    graph: Graph, profile: Profile, moving: frozenset[str]
) -> list[int]:
    """Bytes that have to be there at every node, whatever else is away.

    What a node reads and writes, its result over an input where it can be; its scratch
    memory unless it is a convolution; what never leaves, and results of the step.
    """
    count = len(graph.nodes)
    found = [rounded(profile.workspaces.get(node.name, 0)) for node in graph.nodes]
    for position, node in enumerate(graph.nodes):
        found[position] -= _in_place_bytes(graph, node)
    for use in uses_of(graph).values():
        if use.persistent and use.storage not in moving:
            at: Sequence[int] = range(count)
        elif use.positions and use.positions[-1] == count and not use.persistent:
            last = use.positions[-2] if len(use.positions) > 1 else 0
            at = [*use.positions[:-2], *range(last, count)]
        else:
            at = use.positions
        for position in at:
            if position < count:
                found[position] += use.nbytes
    return found


def _in_place_bytes(graph: Graph, node: Node) -> int:
    """Bytes that a node needs less if its first result is in place."""
    if not node.traits.overwrites or not node.outputs:
        return 0
    result = graph.tensors[node.outputs[0]]
    if result.alias is not None:
        return 0
    fixed = {graph.storages[name] for name in graph.inputs}
    for index in node.traits.overwrites:
        taken = graph.storages[node.inputs[index]]
        if taken not in fixed and graph.tensors[taken].nbytes == result.nbytes:
            return rounded(result.nbytes)
    return 0


class Chains:
    """What has to run again for which saved tensor.

    Attributes:
        chains: Saved tensor -> nodes, if all other saved tensors are there.
        parents: Saved tensor -> saved tensors that they read.
        shared: Nodes that are in several of the chains.

    Args:
        graph: A training graph that nothing has made in-place yet.
    """

    def __init__(self, graph: Graph) -> None:
        names = dict.fromkeys(saved.name for saved in saved_tensors(graph))
        self.chains: dict[str, tuple[str, ...]] = {}
        self.parents: dict[str, tuple[str, ...]] = {}
        count: Counter[str] = Counter()
        for name in names:
            nodes = recompute_chain(graph, name, names.__contains__)
            self.chains[name] = tuple(node.name for node in nodes)
            read = {graph.storages[t] for node in nodes for t in node.inputs}
            self.parents[name] = tuple(n for n in names if n in read and n != name)
            count.update(self.chains[name])
        self.shared = frozenset(name for name, times in count.items() if times > 1)
