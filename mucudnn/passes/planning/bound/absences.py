"""Gaps between uses in which storages may be off the device: items of the relaxation.

A step is divided into windows of consecutive nodes. In every plan a storage is resident
at the nodes that use it, and may be absent only in the gaps between two uses. Each gap
is one absence, with its windows and the ways to restore the storage at its end. All of
this follows from the training graph alone, before in-place rewriting and recomputation.
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
    """Partition of a step's nodes into windows of consecutive nodes.

    Attributes:
        starts: Position of the first node of each window, ascending from 0.
        count: Number of nodes of the step.
    """

    starts: tuple[int, ...]
    count: int

    def __len__(self) -> int:
        return len(self.starts)

    def of(self, position: int) -> int:
        """Return the window of a position, modulo the step."""
        return bisect_right(self.starts, position % max(1, self.count)) - 1

    def within(self, gap: "Absence", position: int) -> int:
        """Return the index among a gap's windows of a position in the gap."""
        window = self.of(position)
        if position < self.count:
            return gap.windows.index(window)
        return len(gap.windows) - 1 - gap.windows[::-1].index(window)

    def between(self, first: int, last: int) -> tuple[int, ...]:
        """Return the windows between two positions, even across the end of a step."""
        begin, end = self.of(first), self.of(last)
        if last < self.count:
            return tuple(range(begin, end + 1))
        return (*range(begin, len(self)), *range(end + 1))


@dataclass(frozen=True, slots=True)
class Absence:
    """A gap between two uses in which a storage may be off the device.

    Attributes:
        storage: Name of the storage, or of one of several equivalent storages.
        nbytes: Bytes of all equivalent storages.
        after: Position of the use before the gap.
        before: Position of the use behind the gap; `count` or more in the next step.
        windows: Windows that the gap crosses, in order.
        clean: Whether the host already has the bytes, so that no offload is needed.
        stuck: Whether the storage cannot be copied.
        again: Windows in which the storage can be recomputed.
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
    """Divide nodes into windows of about equal weight."""
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
    """Return all absences; those of equivalent parameters and state are merged."""
    found: list[Absence] = []
    alike: dict[tuple[int, ...], list[Absence]] = {}
    for use in uses_of(graph).values():
        if use.persistent and use.storage in moving:
            for absence in _of_persistent(use, windows):
                key = (*absence.windows, windows.count * absence.clean)
                alike.setdefault(key, []).append(absence)
        elif not use.persistent and use.nbytes >= least_bytes:
            found += _of_activation(graph, use, windows)
    return [*found, *map(_merge, alike.values())]


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
    """Return the phases in which a storage may be recomputed; see `Residency`."""
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


def _merge(alike: Sequence[Absence]) -> Absence:
    """Merge absences in the same windows into one that all of them cover."""
    return replace(
        alike[0],
        nbytes=sum(absence.nbytes for absence in alike),
        after=max(absence.after for absence in alike),
        before=min(absence.before for absence in alike),
    )


def bytes_of_operands(
    graph: Graph, profile: Profile, moving: frozenset[str]
) -> list[int]:
    """Return the bytes that must be resident at every node in any plan.

    These are a node's operands (its result in place where possible), its scratch memory
    unless it is a convolution, resident tensors, and results of the step.
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
    """Return the bytes a node saves if its first result is in place."""
    if not node.traits.overwrites or not node.outputs:
        return 0
    result = graph.tensors[node.outputs[0]]
    if result.alias is not None:
        return 0
    fixed = {graph.storages[name] for name in graph.inputs}
    for index in node.traits.overwrites:
        overwritten = graph.storages[node.inputs[index]]
        if (
            overwritten not in fixed
            and graph.tensors[overwritten].nbytes == result.nbytes
        ):
            return rounded(result.nbytes)
    return 0


class Chains:
    """Recompute chains of the saved tensors of a training graph.

    Attributes:
        chains: Nodes of each saved tensor's chain if all other saved tensors are
        resident. parents: Saved tensors that each saved tensor's chain reads. shared:
        Nodes in several chains.
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
