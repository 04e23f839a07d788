"""Partition a graph into groups of nodes that may become one.

A run is the longest sequence of neighbours in the order, of one phase, that can be
computed inside a fused node, views between them not counted. It falls into parts whose
nodes share tensors. Each part is cut into consecutive pieces, so every group is convex:
no other node that depends on a member comes before another member.

Of all partitions, the one is chosen that saves most memory traffic, in bytes that are
read and written, where a saved launch counts as some bytes, too. A piece is a group
only if its inputs and outputs together are not larger than the peak of its members, one
after another. So fusing never delays the freeing of a tensor where that matters.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mucudnn.ir.graph import Graph, Node
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.liveness import live_ranges
from mucudnn.torch.costs.measure import touched_bytes
from mucudnn.torch.fusion.groups import Group, Grouping
from mucudnn.torch.fusion.members import fusible, passes_through
from mucudnn.torch.lowering.lowered import Lowered

_LONGEST = 24
_LAUNCH = 1 << 16
"""Bytes of traffic that take as long as a launch."""

_SHARED = 1 << 12
"""Bytes of an input from which on its readers are in one part."""

_SLACK = 1 / 16
"""Share of its members' bytes that a kernel may use beyond them, for sums."""


def groups_of(lowered: Lowered, workspaces: Mapping[str, int]) -> tuple[Group, ...]:
    """Return groups of nodes that may become one node each.

    Args:
        lowered: The graph.
        workspaces: Node -> bytes of its scratch memory.
    """
    cut = _Cutting(lowered, Grouping(lowered), Footprint(lowered, workspaces))
    found = []
    for run in _runs(lowered):
        for part in _parts(lowered, run):
            found += cut.best(part)
    return tuple(found)


class Footprint:
    """Bytes that nodes and groups have in use of the tensors that they touch.

    Args:
        lowered: Their graph.
        workspaces: Node -> bytes of its scratch memory.
    """

    def __init__(self, lowered: Lowered, workspaces: Mapping[str, int]) -> None:
        self._graph = lowered.graph
        self._planned = in_place(lowered.graph)
        self._live = live_ranges(self._planned)
        self._workspaces = workspaces

    def fits(self, group: Group, scratch: int = 0) -> bool:
        """Return whether a group has no more in use than its members one by one."""
        graph = self._graph
        names = [*group.inputs, *group.outputs[group.taken is not None :]]
        fused = _bytes(graph, {graph.storages[name] for name in names})
        return fused + scratch <= (1 + _SLACK) * self._apart(group)

    def _apart(self, group: Group) -> int:
        graph, storages = self._graph, self._planned.storages
        nodes = [graph.by_name[name] for name in group.members]
        touched = {storages[t] for node in nodes for t in node.tensors}
        most = 0
        for node in nodes:
            at = graph.positions[node.name]
            here = {
                s for s in touched if self._live[s].first <= at <= self._live[s].last
            }
            scratch = self._workspaces.get(node.name, 0)
            most = max(most, _bytes(graph, here) + scratch)
        return most


@dataclass(frozen=True)
class _Cutting:
    """Cuts parts of runs into groups."""

    lowered: Lowered
    grouping: Grouping
    footprint: Footprint

    def best(self, part: Sequence[Node]) -> list[Group]:
        """Return the groups that save most traffic, by dynamic programming."""
        count = len(part)
        saved = [0.0] * (count + 1)
        chosen: list[tuple[int, Group | None]] = [(0, None)] * (count + 1)
        traffic = [self._traffic((*node.tensors, *node.mutates)) for node in part]
        for end in range(1, count + 1):
            saved[end], chosen[end] = saved[end - 1], (end - 1, None)
            for begin in range(max(0, end - _LONGEST), end - 1):
                group = self.grouping.group(part[begin:end])
                if group is None or not self.footprint.fits(group):
                    continue
                fused = self._traffic((*group.inputs, *group.outputs))
                gain = sum(traffic[begin:end]) - fused
                if saved[begin] + gain > saved[end]:
                    saved[end], chosen[end] = saved[begin] + gain, (begin, group)
        found = []
        at = count
        while at:
            at, group = chosen[at]
            if group is not None:
                found.append(group)
        return found[::-1]

    def _traffic(self, tensors: Sequence[str]) -> int:
        layouts = self.lowered.layouts
        names = dict.fromkeys(tensors)
        return _LAUNCH + sum(touched_bytes(layouts[name]) for name in names)


def _runs(lowered: Lowered) -> Iterator[list[Node]]:
    """Yield runs of neighbours of one phase that may be fused."""
    run: list[Node] = []
    for node in lowered.graph.nodes:
        if passes_through(lowered, node):
            continue
        if fusible(lowered, node) and (not run or run[0].phase is node.phase):
            run.append(node)
            continue
        yield run
        run = [node] if fusible(lowered, node) else []
    yield run


def _parts(lowered: Lowered, run: Sequence[Node]) -> list[list[Node]]:
    """Return the parts of a run: nodes that share results or large inputs."""
    graph = lowered.graph
    made = {graph.storages[t] for node in run for t in (*node.outputs, *node.mutates)}
    parts: list[tuple[set[str], list[Node]]] = []
    for node in run:
        touched = {graph.storages[t] for t in node.tensors}
        touched = {
            s for s in touched if s in made or graph.tensors[s].nbytes >= _SHARED
        }
        mine = [part for part in parts if not part[0].isdisjoint(touched)]
        parts = [part for part in parts if part[0].isdisjoint(touched)]
        storages = touched.union(*(part[0] for part in mine))
        nodes = [n for part in mine for n in part[1]]
        parts.append((storages, [*nodes, node]))
    positions = graph.positions
    return [sorted(nodes, key=lambda n: positions[n.name]) for _, nodes in parts]


def _bytes(graph: Graph, storages: set[str]) -> int:
    return sum(graph.tensors[s].nbytes for s in storages)
