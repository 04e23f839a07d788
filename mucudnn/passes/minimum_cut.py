"""Minimum cut of a flow network, by Dinic's algorithm (1970).

Flow is augmented along shortest paths from the source to the sink until none is left;
the saturated edges are then a minimum cut (Ford and Fulkerson, 1956).
"""

from collections import defaultdict, deque
from collections.abc import Hashable
from itertools import pairwise

__all__ = ["SINK", "SOURCE", "FlowNetwork"]

SOURCE, SINK = "source", "sink"

_ROUNDING = 1e-12
"""Residual capacities below this part of the largest capacity are rounding errors."""


class FlowNetwork:
    """A flow network; its vertices include `SOURCE` and `SINK`."""

    def __init__(self) -> None:
        self._residual: dict[Hashable, dict[Hashable, float]] = defaultdict(dict)
        self._largest = 0.0

    def add(self, start: Hashable, end: Hashable, capacity: float) -> None:
        """Add capacity to a directed edge; an infinite edge is never cut."""
        ways = self._residual[start]
        ways[end] = ways.get(end, 0.0) + capacity
        self._residual[end].setdefault(start, 0.0)
        if capacity != float("inf"):
            self._largest = max(self._largest, capacity)

    def sink_side(self) -> set[Hashable]:
        """Return the sink's side of a minimum cut, the smallest if there are several.

        The network is consumed: no other method may be called afterwards.
        """
        while (depth := self._depths()).get(SINK):
            ways = {vertex: list(ends) for vertex, ends in self._residual.items()}
            while self._augment(depth, ways):
                pass
        return self._vertices_reaching_sink()

    def _has_residual(self, start: Hashable, end: Hashable) -> bool:
        return self._residual[start][end] > _ROUNDING * self._largest

    def _depths(self) -> dict[Hashable, int]:
        """Return the vertices reachable from the source, with their distances."""
        depth: dict[Hashable, int] = {SOURCE: 0}
        queue: deque[Hashable] = deque([SOURCE])
        while queue:
            vertex = queue.popleft()
            for end in self._residual[vertex]:
                if end not in depth and self._has_residual(vertex, end):
                    depth[end] = depth[vertex] + 1
                    queue.append(end)
        return depth

    def _augment(
        self, depth: dict[Hashable, int], ways: dict[Hashable, list[Hashable]]
    ) -> bool:
        """Augment one shortest path; dead ends are removed from `ways`."""
        path: list[Hashable] = [SOURCE]
        while path[-1] != SINK:
            vertex = path[-1]
            while ways[vertex]:
                end = ways[vertex][-1]
                if depth.get(end) == depth[vertex] + 1 and self._has_residual(
                    vertex, end
                ):
                    path.append(end)
                    break
                ways[vertex].pop()
            else:
                if len(path) == 1:
                    return False
                path.pop()
                ways[path[-1]].pop()
        pairs = list(pairwise(path))
        amount = min(self._residual[start][end] for start, end in pairs)
        for start, end in pairs:
            self._residual[start][end] -= amount
            self._residual[end][start] += amount
        return True

    def _vertices_reaching_sink(self) -> set[Hashable]:
        found: set[Hashable] = {SINK}
        queue: deque[Hashable] = deque([SINK])
        while queue:
            vertex = queue.popleft()
            for start in self._residual[vertex]:
                if start not in found and self._has_residual(start, vertex):
                    found.add(start)
                    queue.append(start)
        return found
