"""Live ranges of storages and dependencies between nodes.

Views and in-place results have no bytes of their own: their uses are uses of their
storage. A storage is live from the first node that writes it to the last node that
touches it under any name. Parameters, state and borrowed tensors are always live,
inputs from the start, and results to the end: outputs, and gradients that no update of
the same graph consumes.
"""

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mucudnn.ir.graph import PERSISTENT, Graph, Node, Phase
from mucudnn.ir.tensor import Role, TensorSpec

ALIGNMENT = 512
"""Alignment of all sizes and offsets in an arena, in bytes; as in CUDA's allocator."""


@dataclass(frozen=True, slots=True)
class LiveRange:
    """Live range of a storage.

    Attributes:
        first: Position of the first node; 0 if live at the start.
        last: Position of the last node; the number of nodes if live at the end.
    """

    first: int
    last: int


class Use(NamedTuple):
    """Uses of a storage.

    Attributes:
        storage: Name of the storage.
        nbytes: Aligned size in bytes.
        positions: Nodes that read or write the storage, ascending; for an input also
            position 0, for a result also the number of nodes.
        writes: The positions that write.
        period: For a storage that outlives the step, the number of nodes of a step: its
            next use after the last one is its first use, `period` nodes later. Else 0.
    """

    storage: str
    nbytes: int
    positions: tuple[int, ...]
    writes: tuple[int, ...]
    period: int = 0

    @property
    def persistent(self) -> bool:
        """True if the storage outlives the step: a parameter, or state."""
        return self.period > 0

    def gaps(self) -> list[tuple[int, int]]:
        """Return pairs of successive uses with nodes in between.

        For a persistent storage this includes the last use and the first use in the
        next step, whose position is increased by the period.
        """
        positions, period = self.positions, self.period
        found = [(i, j) for i, j in itertools.pairwise(positions) if j - i > 1]
        if period and positions:
            found.append((positions[-1], positions[0] + period))
        return found


def live_at_end(graph: Graph) -> frozenset[str]:
    """Return the storages live at the end of the step, persistent ones included."""
    used_up = {
        name
        for node in graph.nodes
        if node.phase is Phase.UPDATE
        for name in node.inputs
    }
    asked = (*graph.outputs, *(g for g in graph.gradients.values() if g not in used_up))
    persistent = (spec.name for spec in graph.with_role(*PERSISTENT))
    return frozenset(graph.storages[name] for name in (*asked, *persistent))


def live_ranges(graph: Graph) -> Mapping[str, LiveRange]:
    """Return the live range of every used storage.

    An unread input is live for the whole step, as it is fed all the same.
    """
    storages, tensors, end = graph.storages, graph.tensors, len(graph.nodes)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        for name in node.tensors:
            first.setdefault(storages[name], position)
            last[storages[name]] = position
    for storage in (storages[name] for name in graph.inputs):
        if storage in first or tensors[storage].role is Role.INPUT:
            first[storage] = 0
            last.setdefault(storage, end)
    for storage in live_at_end(graph):
        last[storage] = end
        if tensors[storage].role in PERSISTENT:
            first[storage] = 0
    return {
        name: LiveRange(first[name], last[name]) for name in tensors if name in first
    }


def uses_of(graph: Graph) -> Mapping[str, Use]:
    """Return the uses of every storage, in order of first use; unused ones last."""
    return uses_by(graph, *touches(graph), KnownTensors())


Positions = dict[str, tuple[int, ...]]
"""Positions of nodes for each storage, ascending."""


def touches(graph: Graph) -> tuple[Positions, Positions]:
    """Return the positions at which each storage is used, and written; see `Use`."""
    count, storages = len(graph.nodes), graph.storages
    positions: dict[str, list[int]] = {}
    writes: dict[str, list[int]] = {}
    for spec in graph.with_role(Role.INPUT):
        positions[spec.name], writes[spec.name] = [0], [0]
    for i, node in enumerate(graph.nodes):
        for name in node.tensors:
            known = positions.setdefault(storages[name], [])
            if known[-1:] != [i]:
                known.append(i)
        for storage in written(graph, node):
            writes.setdefault(storage, []).append(i)
    # What lives at the end has a use behind the last node, unless it is persistent.
    for storage in live_at_end(graph):
        if graph.tensors[storage].role in PERSISTENT:
            positions.setdefault(storage, [])
        elif positions.setdefault(storage, [count])[-1] != count:
            positions[storage].append(count)
    return _as_tuples(positions), _as_tuples(writes)


def _as_tuples(positions: Mapping[str, list[int]]) -> Positions:
    return {storage: tuple(found) for storage, found in positions.items()}


@dataclass(frozen=True, slots=True)
class KnownTensors:
    """Facts that are equal in all rewrites of a graph, where names have one meaning.

    Attributes:
        sizes: Aligned size of each storage, and whether it outlives the step.
        shared: Descriptions of results by result and input whose bytes they overwrite.
    """

    sizes: dict[str, tuple[int, bool]] = field(default_factory=dict)
    shared: dict[tuple[str, str], TensorSpec] = field(default_factory=dict)


class Touches:
    """`touches` of a graph, and of the same graph with inserted nodes."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self.known = graph, KnownTensors()
        self._positions, self._writes = touches(graph)
        self._names = list(self._positions)  # in order of first use, unused ones last
        end = (len(graph.nodes),)
        self._firsts = [(found or end)[0] for found in self._positions.values()]
        self._latest = _latest(self._positions)
        self._latest_write = _latest(self._writes)

    def with_nodes(
        self, graph: Graph, copies: Sequence[int], rebound: Iterable[tuple[int, int]]
    ) -> tuple[Positions, Positions]:
        """Return `touches` of a graph with inserted nodes, in a fraction of its time.

        Args:
            graph: This graph with these nodes; its own tensors have their storages.
            copies: Positions of the inserted nodes, ascending.
            rebound: Positions, before and after, of the nodes with other inputs.
        """
        inserted, storages, known = set(copies), graph.storages, self._graph.storages
        others = [i for i in range(len(graph.nodes) + 1) if i not in inserted]
        moved = others.__getitem__
        first = copies[0] if copies else len(graph.nodes) + 1
        positions, writes = dict(self._positions), dict(self._writes)
        # Positions behind the first insertion shift; `latest` has the last use first.
        for found, latest in ((positions, self._latest), (writes, self._latest_write)):
            for last, name in latest:
                if last < first:
                    break
                found[name] = tuple(map(moved, found[name]))
        # Add the uses by inserted nodes; a new storage is ordered by its first use.
        order: list[str] = []
        done = 0
        for count, now in enumerate(copies):
            node = graph.nodes[now]
            for name in node.tensors:
                storage = storages[name]
                if storage in positions:
                    positions[storage] = _with(positions[storage], now)
                    continue
                positions[storage] = (now,)
                earlier = bisect.bisect_left(self._firsts, now - count)
                order += (*self._names[done:earlier], storage)
                done = earlier
            for storage in written(graph, node):
                writes[storage] = _with(writes.get(storage, ()), now)
        # Move the uses of nodes that read other tensors now.
        for before, now in rebound:
            old, new = self._graph.nodes[before], graph.nodes[now]
            was = set(map(known.__getitem__, old.tensors))
            used = set(map(storages.__getitem__, new.tensors))
            for storage in was - used:
                positions[storage] = tuple(i for i in positions[storage] if i != now)
            for storage in used - was:
                positions[storage] = _with(positions[storage], now)
        order += self._names[done:]
        return {name: positions[name] for name in order}, writes


def _latest(positions: Positions) -> list[tuple[int, str]]:
    """Return the last position of each storage, descending."""
    return sorted(
        ((at[-1], name) for name, at in positions.items() if at), reverse=True
    )


def _with(positions: tuple[int, ...], position: int) -> tuple[int, ...]:
    """Return ascending positions and another one, unless it is there."""
    if not positions or positions[-1] < position:
        return (*positions, position)
    at = bisect.bisect_left(positions, position)
    if positions[at] == position:
        return positions
    return (*positions[:at], position, *positions[at:])


def uses_by(
    graph: Graph, positions: Positions, writes: Positions, known: "KnownTensors"
) -> Mapping[str, Use]:
    """Return the uses of storages from their positions and writes."""
    period, found, sizes = max(1, len(graph.nodes)), {}, known.sizes
    make = tuple.__new__  # a named tuple's own constructor takes twice as long
    for storage, at in positions.items():
        if storage not in sizes:
            spec = graph.tensors[storage]
            sizes[storage] = rounded(spec.nbytes), spec.role in PERSISTENT
        nbytes, persistent = sizes[storage]
        cycle = period if persistent else 0
        found[storage] = make(
            Use, (storage, nbytes, at, writes.get(storage, ()), cycle)
        )
    return found


def rounded(nbytes: int, granularity: int = ALIGNMENT) -> int:
    """Return a size rounded up to a multiple of `granularity`."""
    return -(-nbytes // granularity) * granularity


# Dependencies between nodes: every order that respects them computes the same bits.
#
# A node depends on the writers of the tensors that it reads. Where several nodes write
# the same bytes (in-place results, state that a step changes), it also depends on the
# last of them before it, and a node that overwrites depends on all readers of the
# bytes' previous contents.


def written(graph: Graph, node: Node) -> tuple[str, ...]:
    """Return the storages whose bytes a node changes."""
    outputs = () if node.traits.view else node.outputs
    storages = graph.storages
    if len(outputs) == 1 and not node.mutates:  # most nodes
        return (storages[outputs[0]],)
    return tuple(dict.fromkeys(storages[t] for t in (*outputs, *node.mutates)))


def finished(graph: Graph, names: Iterable[str]) -> dict[str, int]:
    """Return the position of each tensor's last change; -1 if no node changes it."""
    writes = {s: i for i, n in enumerate(graph.nodes) for s in written(graph, n)}
    made = {t: i for i, node in enumerate(graph.nodes) for t in node.outputs}
    return {
        name: max(writes.get(graph.storages[name], -1), made.get(name, -1))
        for name in names
    }


def writes_before(graph: Graph, readers: Mapping[str, int]) -> dict[str, int]:
    """Return the position of the last write of each storage before its reader."""
    found: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        for storage in written(graph, node):
            if position < readers.get(storage, -1):
                found[storage] = position
    return found


def with_nodes_after(
    graph: Graph, more: Mapping[int, Sequence[Node]]
) -> tuple[Node, ...]:
    """Return a graph's nodes with others inserted behind positions; -1 is the front."""
    nodes = [*more.get(-1, ())]
    for position, node in enumerate(graph.nodes):
        nodes += (node, *more.get(position, ()))
    return tuple(nodes)


def dependencies(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the nodes that each node depends on, ascending."""
    storages = graph.storages
    producer: dict[str, int] = {}
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    result = []
    for position, node in enumerate(graph.nodes):
        before = {producer[name] for name in node.inputs if name in producer}
        changed = written(graph, node)
        read = {storages[name] for name in node.inputs}
        before.update(writer[s] for s in read.union(changed) if s in writer)
        for storage in changed:
            before.update(readers.pop(storage, ()))
            writer[storage] = position
        for storage in read.difference(changed):
            readers.setdefault(storage, []).append(position)
        producer.update(dict.fromkeys(node.outputs, position))
        result.append(tuple(sorted(before)))
    return tuple(result)
