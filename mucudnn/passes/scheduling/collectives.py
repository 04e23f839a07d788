"""When collectives start, and when computation waits for them.

A collective is a node that starts a transfer (`Profile.network_ms`), which runs beside
computation until a node reads its result. A graph is planned with each gathering just
before its first reader, and with each wait just behind its collective: that takes the
least memory. Where the budget has room for the buffers, `overlap` then moves

- a gathering, the first one or one that is run again, right behind the wait for the
  gathering before. Its buffer is in use for as much longer.
- the wait for a reduction, and what follows from it, to the next reduction or to the
  end of the backward pass. The reduction's operands are in use until then.

The minimum feasible budget of a step therefore does not depend on overlap. Collectives
keep their order. All ranks follow one plan, so they have the same order.
"""

from collections.abc import Iterator, Mapping, Sequence

from mucudnn.ir.graph import Graph, Phase
from mucudnn.ir.traits import Collective
from mucudnn.passes.liveness import Use


def overlap(
    graph: Graph, uses: Mapping[str, Use], needed: Sequence[int], budget: float
) -> Graph:
    """Return a graph whose collectives run beside computation where memory permits.

    Args:
        graph: A graph in its final order, recomputed nodes included.
        uses: Uses of its storages.
        needed: Least bytes in use at every node.
        budget: Bytes that may be in use.
    """
    return _Overlap(graph, uses, needed, budget).run()


def under_way(graph: Graph) -> dict[str, set[tuple[int, int]]]:
    """Return storages that collectives use, and from which node to which.

    Each pair has the positions of a collective, and of the wait for it.
    """
    found: dict[str, set[tuple[int, int]]] = {}
    started: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        for start in {started.pop(t) for t in node.inputs if t in started}:
            for name in graph.nodes[start].tensors:
                found.setdefault(graph.storages[name], set()).add((start, position))
        if node.traits.collective:
            started.update(dict.fromkeys(node.outputs, position))
    return found


class _Overlap:
    def __init__(
        self,
        graph: Graph,
        uses: Mapping[str, Use],
        needed: Sequence[int],
        budget: float,
    ) -> None:
        self._graph, self._nodes, self._uses = graph, graph.nodes, uses
        self._used, self._budget = [*needed], budget
        self._before: dict[int, int] = {}  # moved node -> the node that it precedes
        self._readers: dict[str, list[int]] = {}
        for position, node in enumerate(graph.nodes):
            for name in node.inputs:
                self._readers.setdefault(name, []).append(position)

    def run(self) -> Graph:
        """Move what fits; return the graph."""
        for start, ahead in self._gatherings():
            self._gather_early(start, ahead)
        reductions = self._positions(Collective.REDUCE)
        for start, behind in zip(
            reductions, [*reductions[1:], len(self._nodes)], strict=True
        ):
            self._wait_late(start, behind)
        moved = self._before
        if not moved:
            return self._graph
        order = sorted(
            range(len(self._nodes)), key=lambda i: (moved.get(i, i), i not in moved, i)
        )
        nodes = tuple(self._nodes[i] for i in order)
        return self._graph.with_more_nodes(
            self._graph.tensors, nodes, self._graph.storages
        )

    def _positions(self, kind: Collective) -> list[int]:
        return [i for i, n in enumerate(self._nodes) if n.traits.collective is kind]

    def _wait_of(self, start: int) -> int:
        """Return the position of the first node that reads a collective's result."""
        results = self._nodes[start].outputs
        return min(
            (i for t in results for i in self._readers.get(t, ())), default=start
        )

    def _gatherings(self) -> Iterator[tuple[int, int]]:
        """Yield each gathering but the first, and where the one before is complete.

        What is gathered for a pass starts within that pass.
        """
        begin, awaited, known = 0, -1, 0
        for start in self._positions(Collective.GATHER):
            for i in range(known, start):
                if self._nodes[i].phase is not self._nodes[i + 1].phase:
                    begin = i + 1
            if awaited >= 0:
                yield start, max(begin, awaited + 1)
            known, awaited = start, self._wait_of(start)

    def _gather_early(self, start: int, ahead: int) -> None:
        """Move a gathering, and the nodes that only prepare its operands."""
        # What only prepares the operands of the gathering moves along.
        graph, group, pending = self._graph, {start}, [start]
        while pending:
            for name in self._nodes[pending.pop()].inputs:
                made = graph.producers.get(name)
                if made is None or (at := graph.positions[made.name]) in group:
                    continue
                uses = (i for t in made.outputs for i in self._readers.get(t, ()))
                if all(i in group or i > start for i in uses):
                    group.add(at)
                    pending.append(at)
        # The target is behind the last write to what the moved nodes read.
        read = {graph.storages[t] for i in group for t in self._nodes[i].inputs}
        writes = (i for storage in read for i in self._uses[storage].writes)
        written = max((i for i in writes if i < start and i not in group), default=-1)
        target = max(ahead, written + 1)
        moving = [i for i in group if i >= target]
        own = {graph.storages[t] for i in moving for t in self._nodes[i].outputs}
        new = [s for s in own if self._uses[s].positions[0] in group]
        nbytes = sum(self._uses[storage].nbytes for storage in new)
        if self._take([(target, start, nbytes)]):
            self._before.update(dict.fromkeys(moving, target))

    def _wait_late(self, start: int, behind: int) -> None:
        """Move the wait for a reduction, with what depends on it in this pass."""
        nodes, storages = self._nodes, self._graph.storages
        wait = self._wait_of(start)
        if wait == start:
            return
        # Collect what depends on the wait, until a node overwrites their inputs.
        moving, target = [wait], behind
        read = {storages[t] for i in (start, wait) for t in nodes[i].tensors}
        made = {*nodes[start].outputs, *nodes[wait].outputs}
        for i in range(wait + 1, behind):
            overwritten = self._graph.overwritten.get(i, ())
            if nodes[i].phase is Phase.UPDATE or not read.isdisjoint(overwritten):
                target = i
                break
            if not made.isdisjoint(nodes[i].inputs):
                moving.append(i)
                read.update(storages[t] for t in nodes[i].tensors)
                made.update(nodes[i].outputs)
        # Storages in which a delay lengthens a life need room until then.
        found = (self._uses[storage] for storage in read)
        longer = [
            (use.positions[-1] + 1, target, use.nbytes)
            for use in found
            if not use.persistent and use.positions[-1] < target
        ]
        if target > moving[-1] + 1 and self._take(longer):
            self._before.update(dict.fromkeys(moving, target))

    def _take(self, more: Sequence[tuple[int, int, int]]) -> bool:
        """Note further bytes from one node until before another, if they all fit."""
        trial = {
            i: 0 for first, behind, _ in more for i in range(max(first, 0), behind)
        }
        for first, behind, nbytes in more:
            for i in range(first, behind):
                trial[i] += nbytes
        if not trial or any(self._used[i] + n > self._budget for i, n in trial.items()):
            return False
        for i, n in trial.items():
            self._used[i] += n
        return True
