"""The cheapest way to part a network of pipes in two (Dinic, 1970).

Pipes are filled along shortest ways from the source until none is left; then those that
are full part the two ends, and no cheaper cut does (Ford and Fulkerson, 1956).
"""

from collections import defaultdict, deque
from collections.abc import Hashable
from itertools import pairwise

__all__ = ["SINK", "SOURCE", "Pipes"]

SOURCE, SINK = "source", "sink"

_NOTHING = 1e-12
"""Of the largest capacity: what is left of less is a rounding."""


class Pipes:
    """Capacities between points, the `SOURCE` and the `SINK` among them."""

    def __init__(self) -> None:
        self._left: dict[Hashable, dict[Hashable, float]] = defaultdict(dict)
        self._largest = 0.0

    def add(self, start: Hashable, end: Hashable, capacity: float) -> None:
        """Let more through in one direction; infinity for a pipe that is not cut."""
        ways = self._left[start]
        ways[end] = ways.get(end, 0.0) + capacity
        self._left[end].setdefault(start, 0.0)
        if capacity != float("inf"):
            self._largest = max(self._largest, capacity)

    def behind_cut(self) -> set[Hashable]:
        """Points on the sink's side of a cheapest cut, the fewest if several are.

        Nothing else may be called after it: what is left is changed.
        """
        while (depth := self._depths()).get(SINK):
            ways = {point: list(ends) for point, ends in self._left.items()}
            while self._fill(depth, ways):
                pass
        return self._reaching_sink()

    def _open(self, start: Hashable, end: Hashable) -> bool:
        return self._left[start][end] > _NOTHING * self._largest

    def _depths(self) -> dict[Hashable, int]:
        """Points that can be reached, and over how many pipes."""
        depth: dict[Hashable, int] = {SOURCE: 0}
        queue: deque[Hashable] = deque([SOURCE])
        while queue:
            point = queue.popleft()
            for end in self._left[point]:
                if end not in depth and self._open(point, end):
                    depth[end] = depth[point] + 1
                    queue.append(end)
        return depth

    def _fill(
        self, depth: dict[Hashable, int], ways: dict[Hashable, list[Hashable]]
    ) -> bool:
        """Fill one shortest way; `ways` loses those that lead nowhere."""
        path: list[Hashable] = [SOURCE]
        while path[-1] != SINK:
            point = path[-1]
            while ways[point]:
                end = ways[point][-1]
                if depth.get(end) == depth[point] + 1 and self._open(point, end):
                    path.append(end)
                    break
                ways[point].pop()
            else:
                if len(path) == 1:
                    return False
                path.pop()
                ways[path[-1]].pop()
        pairs = list(pairwise(path))
        amount = min(self._left[start][end] for start, end in pairs)
        for start, end in pairs:
            self._left[start][end] -= amount
            self._left[end][start] += amount
        return True

    def _reaching_sink(self) -> set[Hashable]:
        found: set[Hashable] = {SINK}
        queue: deque[Hashable] = deque([SINK])
        while queue:
            point = queue.popleft()
            for start in self._left[point]:
                if start not in found and self._open(start, point):
                    found.add(start)
                    queue.append(start)
        return found
