"""When is each storage needed? Liveness over a straight line of nodes.

Views and results in place have no bytes of their own: their uses are uses of their
storage. A storage is needed from the node that first writes it to the last that
touches it under any name. Parameters, state and what the caller lends are always there,
inputs from the start, and what the caller asked for stays to the end: outputs, and
gradients that no update of the same graph has used up.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mucudnn.ir.graph import PERSISTENT, Graph, Phase, Role
from mucudnn.passes.graph.dependencies import written

__all__ = [
    "ALIGNMENT",
    "LiveRange",
    "Use",
    "kept",
    "last_uses",
    "live_ranges",
    "memory_curve",
    "peak_bytes",
    "rounded",
    "touches",
    "uses_by",
    "uses_of",
]

ALIGNMENT = 512
"""Bytes that every size and offset in an arena is a multiple of, as CUDA's own
allocator guarantees."""


@dataclass(frozen=True, slots=True)
class LiveRange:
    """The nodes during which a storage is in use.

    Attributes:
        storage: The tensor that owns the bytes.
        first: Position of the first node that needs it; 0 if it is there at the start.
        last: Position of the last; the number of nodes if it outlives them all.
    """

    storage: str
    first: int
    last: int


class Use(NamedTuple):
    """When the bytes of a storage are touched.

    Attributes:
        storage: Its name.
        nbytes: Its size, rounded up.
        positions: Nodes that read or write it, ascending; for an input also the first
            node, before which it arrives, and for a result the end.
        writes: Those of them that write it.
        period: Nodes of a step, if it outlives the step: after its last use comes, that
            many nodes later than in this step, its first use in the next. Else 0.
    """

    storage: str
    nbytes: int
    positions: tuple[int, ...]
    writes: tuple[int, ...]
    period: int = 0

    @property
    def persistent(self) -> bool:
        """Whether it outlives the step: a parameter, or state."""
        return self.period > 0

    def gaps(self) -> list[tuple[int, int]]:
        """Pairs of uses with nodes in between.

        Of what outlives the step also the last use and the first of the next step, with
        the latter's position counted on.
        """
        positions, period = self.positions, self.period
        found = [(i, j) for i, j in itertools.pairwise(positions) if j - i > 1]
        if period and positions:
            found.append((positions[-1], positions[0] + period))
        return found


def kept(graph: Graph) -> frozenset[str]:
    """Storages still needed when the last node has run, persistent ones included."""
    used_up = {
        name
        for node in graph.nodes
        if node.phase is Phase.UPDATE
        for name in node.inputs
    }
    asked = (*graph.outputs, *(g for g in graph.gradients.values() if g not in used_up))
    persistent = (spec.name for spec in graph.with_role(*PERSISTENT))
    return frozenset(graph.storages[name] for name in (*asked, *persistent))


def last_uses(graph: Graph) -> dict[str, int]:
    """Storage -> the last node of its live range."""
    storages, end = graph.storages, len(graph.nodes)
    last: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        for name in node.inputs:
            last[storages[name]] = position
        for name in node.outputs:
            last[storages[name]] = position
    for name in graph.inputs:
        storage = storages[name]
        if storage not in last and graph.tensors[storage].role is Role.INPUT:
            last[storage] = end
    last.update(dict.fromkeys(kept(graph), end))
    return last


def live_ranges(graph: Graph) -> Mapping[str, LiveRange]:
    """The live range of every storage; what is declared but unused has none.

    An input that nobody reads is there for the whole step: it is fed all the same.
    """
    first, last = _first_uses(graph), last_uses(graph)
    return {
        name: LiveRange(name, first[name], last[name])
        for name in graph.tensors
        if name in first
    }


def _first_uses(graph: Graph) -> dict[str, int]:
    """Storage -> the first node of its live range."""
    storages = graph.storages
    first: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        for name in node.tensors:
            first.setdefault(storages[name], position)
    for name in graph.inputs:
        storage = storages[name]
        if storage in first or graph.tensors[storage].role is Role.INPUT:
            first[storage] = 0
    for storage in kept(graph):
        if graph.tensors[storage].role in PERSISTENT:
            first[storage] = 0
    return first


def uses_of(graph: Graph) -> Mapping[str, Use]:
    """The uses of every storage, in order of first use; those of none come last."""
    return uses_by(graph, *touches(graph))


Positions = dict[str, list[int]]
"""Storage -> positions of nodes, ascending."""


def touches(graph: Graph) -> tuple[Positions, Positions]:
    """Where every storage is used, and where it is written: see `Use`."""
    count, storages = len(graph.nodes), graph.storages
    positions: Positions = {}
    writes: Positions = {}
    for spec in graph.with_role(Role.INPUT):
        positions[spec.name], writes[spec.name] = [0], [0]
    for i, node in enumerate(graph.nodes):
        for name in node.tensors:
            storage = storages[name]
            known = positions.get(storage)
            if known is None:
                positions[storage] = [i]
            elif known[-1] != i:
                known.append(i)
        for storage in written(graph, node):
            if storage in writes:
                writes[storage].append(i)
            else:
                writes[storage] = [i]
    for storage in kept(graph):
        if graph.tensors[storage].role in PERSISTENT:
            positions.setdefault(storage, [])
        elif positions.setdefault(storage, [count])[-1] != count:
            positions[storage].append(count)
    return positions, writes


def uses_by(graph: Graph, positions: Positions, writes: Positions) -> Mapping[str, Use]:
    """The uses of every storage that is named, by where it is touched."""
    period, tensors, nothing = max(1, len(graph.nodes)), graph.tensors, ()
    return {
        storage: Use(
            storage,
            rounded(spec.nbytes),
            tuple(found),
            tuple(writes.get(storage, nothing)),
            period if spec.role in PERSISTENT else 0,
        )
        for storage, found in positions.items()
        for spec in [tensors[storage]]
    }


def memory_curve(
    graph: Graph,
    workspaces: Mapping[str, int] | None = None,
    *,
    granularity: int = 1,
) -> tuple[int, ...]:
    """Bytes in use while each node runs, if storages are freed after their last use.

    Args:
        graph: What is run.
        workspaces: Node -> bytes of scratch memory while it runs.
        granularity: Sizes are rounded up to multiples of this many bytes.
    """
    workspaces = workspaces or {}
    end = len(graph.nodes)
    change = [0] * (end + 1)
    for storage, live in live_ranges(graph).items():
        nbytes = rounded(graph.tensors[storage].nbytes, granularity)
        change[live.first] += nbytes
        if live.last < end:
            change[live.last + 1] -= nbytes
    return tuple(
        used + rounded(workspaces.get(node.name, 0), granularity)
        for used, node in zip(itertools.accumulate(change), graph.nodes, strict=False)
    )


def peak_bytes(
    graph: Graph, workspaces: Mapping[str, int] | None = None, *, granularity: int = 1
) -> int:
    """The most memory in use at once; without nodes, what is always there."""
    always = (rounded(graph.tensors[s].nbytes, granularity) for s in live_ranges(graph))
    curve = memory_curve(graph, workspaces, granularity=granularity)
    return max(curve) if curve else sum(always)


def rounded(nbytes: int, granularity: int = ALIGNMENT) -> int:
    """A size rounded up to a multiple."""
    return -(-nbytes // granularity) * granularity
