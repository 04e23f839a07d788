"""Search for the order of nodes with the lowest peak memory.

The bytes in use between two nodes depend only on the set of nodes that have run, not on
their order. An order is therefore a path through such sets, and the lowest peak is a
shortest path whose length is its highest step (dynamic programming over sets, as in Ahn
et al. 2020, `Ordering Chaos`, section 3). Three rules keep the sets few without losing
the optimum:

* Nodes that are ordered with respect to all others divide a graph into pieces with
  independent peaks.
* A ready node that does not raise the peak and leaves no more memory in use than before
  may run at once: moved to the front of any order it raises no step.
* The search stops at a lower bound: the largest footprint a node has in every order.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mucudnn.passes.ordering.footprint import Footprint

__all__ = ["STATE_LIMIT", "improved"]

STATE_LIMIT = 20_000
"""Sets of nodes that an exact search visits before it gives up."""

_WINDOWS = (24, 12)
_WINDOW_STATES = 2_000
_ROUNDS = 64
_BOUNDED = 400


def improved(
    footprint: Footprint,
    order: Sequence[int],
    parts: Sequence[tuple[int, int]],
    state_limit: int = STATE_LIMIT,
) -> list[int]:
    """Lower the peak of an order.

    Returns:
        An order with the lowest possible peak, unless the limit was reached.
    """
    result = list(order)
    pieces = [piece for a, b in parts for piece in _pieces(footprint, a, b)]
    given_up: set[tuple[int, int]] = set()
    for _ in range(len(pieces) + _ROUNDS):
        curve = footprint.curve(result)
        top = max(range(len(curve)), key=curve.__getitem__, default=-1)
        piece = next((p for p in pieces if p[0] <= top < p[1]), None)
        if piece is None:
            break
        better, exact = None, False
        if piece not in given_up:
            better, exact = _Window.of(footprint, result, piece).search(state_limit)
            if not exact:
                given_up.add(piece)
        if better is not None:
            result[slice(*piece)] = better
        elif exact or not _improve_around(footprint, result, piece, top):
            break
    return result


def _pieces(footprint: Footprint, start: int, stop: int) -> list[tuple[int, int]]:
    """Return the ranges between nodes that are ordered with respect to all others."""
    size = stop - start
    first_after = [min((n for n in a if n < stop), default=stop) for a in
                   footprint.after[start:stop]]  # fmt: skip
    last_before = [max(b, default=-1) for b in footprint.before[start:stop]]
    awaited = list(itertools.accumulate(first_after, max, initial=start))
    waited = list(itertools.accumulate(reversed(last_before), min, initial=stop))
    cuts = [
        start + k
        for k in range(size)
        if awaited[k] <= start + k and waited[size - 1 - k] >= start + k
    ]
    return [
        (a + 1, b)
        for a, b in itertools.pairwise([start - 1, *cuts, stop])
        if b - a > 2  # a piece of one node has one order
    ]


def _improve_around(
    footprint: Footprint, order: list[int], piece: tuple[int, int], top: int
) -> bool:
    """Reorder a few nodes around the peak; return whether that lowered the peak."""
    for width in _WINDOWS:
        for start in range(top - width + 1, top + 1, 4):
            window = max(piece[0], start), min(piece[1], start + width)
            better, _ = _Window.of(footprint, order, window).search(_WINDOW_STATES)
            if better is not None:
                order[slice(*window)] = better
                return True
    return False


@dataclass(frozen=True, slots=True)
class _Window:
    """Consecutive nodes of an order, to be reordered among themselves.

    Nodes are numbered from 0 in the given order, sets of nodes are bit masks, and
    memory is relative to the bytes in use before the window.

    Attributes:
        nodes: Numbers of the nodes in the graph.
        before: Set of dependencies of each node.
        after: Dependents of each node.
        allocated: Bytes that each node allocates.
        workspace: Scratch bytes of each node.
        freed: Storages the window frees: set of users, bytes, and set of the node that
            allocates it (empty if before the window).
        frees: Indices into `freed` of the storages each node uses.
    """

    nodes: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]
    allocated: tuple[int, ...]
    workspace: tuple[int, ...]
    freed: tuple[tuple[int, int, int], ...]
    frees: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, footprint: Footprint, order: Sequence[int], window: tuple[int, int]
    ) -> "_Window":
        """Return the window of a range of positions."""
        nodes = tuple(order[slice(*window)])
        index = {n: i for i, n in enumerate(nodes)}
        later = set(order[window[1] :])
        before = tuple(
            sum(1 << index[p] for p in footprint.before[n] if p in index) for n in nodes
        )
        after = tuple(
            tuple(index[f] for f in footprint.after[n] if f in index) for n in nodes
        )
        storages = sorted({s for n in nodes for s in footprint.touched[n]})
        number: dict[int, int] = {}
        freed: list[tuple[int, int, int]] = []
        for s in storages:
            users = footprint.users[s]
            if later.isdisjoint(users):
                number[s] = len(freed)
                mask = sum(1 << index[n] for n in users if n in index)
                mine = index.get(footprint.owner[s])
                allocator = 0 if mine is None else 1 << mine
                freed.append((mask, footprint.sizes[s], allocator))
        frees = tuple(
            tuple(number[s] for s in footprint.touched[n] if s in number) for n in nodes
        )
        allocated = tuple(footprint.allocated[n] for n in nodes)
        workspace = tuple(footprint.workspace[n] for n in nodes)
        return cls(nodes, before, after, allocated, workspace, tuple(freed), frees)

    def search(self, state_limit: int) -> tuple[list[int] | None, bool]:
        """Search for the order with the lowest peak, best first over sets of nodes.

        Returns:
            The best order below the present peak, or None; and whether the search was
            complete.
        """
        ceiling = self._peak()
        floor = self._floor()
        if floor >= ceiling:
            return None, True
        ready = sum(1 << i for i, b in enumerate(self.before) if not b)
        whole = (1 << len(self.nodes)) - 1
        heap = [(floor, 0, 0, 0, ready)]
        reached: dict[int, tuple[int, int, int]] = {0: (floor, -1, 0)}
        closed: set[int] = set()
        while heap:
            peak, left, used, done, ready = heapq.heappop(heap)
            if done == whole:
                return self._path(reached), True
            if done in closed:
                continue
            if len(closed) >= state_limit:
                return None, False
            closed.add(done)
            for i, high, after in self._steps(peak, used, done, ready):
                then = done | 1 << i
                if high >= ceiling or (then in reached and reached[then][0] <= high):
                    continue
                reached[then] = (high, i, done)
                heapq.heappush(
                    heap, (high, left - 1, after, then, self._ready(ready, then, i))
                )
        return None, True

    def _steps(
        self, peak: int, used: int, done: int, ready: int
    ) -> list[tuple[int, int, int]]:
        """Return the possible next nodes: node, peak with it, bytes in use after it."""
        steps = []
        while ready:
            bit = ready & -ready
            ready ^= bit
            i = bit.bit_length() - 1
            high = used + self.allocated[i] + self.workspace[i]
            after = used + self.allocated[i]
            rest = ~(done | bit)
            for storage in self.frees[i]:
                mask, nbytes, _ = self.freed[storage]
                if not mask & rest:
                    after -= nbytes
            if high <= peak and after <= used:
                return [(i, peak, after)]
            steps.append((i, max(high, peak), after))
        return steps

    def _ready(self, ready: int, done: int, i: int) -> int:
        ready ^= 1 << i
        for follower in self.after[i]:
            if not self.before[follower] & ~done:
                ready |= 1 << follower
        return ready

    def _path(self, reached: dict[int, tuple[int, int, int]]) -> list[int]:
        done = (1 << len(self.nodes)) - 1
        path = []
        while done:
            _, i, done = reached[done]
            path.append(self.nodes[i])
        return path[::-1]

    def _peak(self) -> int:
        used = done = peak = 0
        for i in range(len(self.nodes)):
            peak = max(peak, used + self.allocated[i] + self.workspace[i])
            [(_, _, used)] = self._steps(0, used, done, 1 << i)
            done |= 1 << i
        return peak

    def _floor(self) -> int:
        """Return a lower bound of the peak: the largest footprint a node always has."""
        count = len(self.nodes)
        if count > _BOUNDED:
            return 0
        above = [0] * count
        for i in range(count):
            for follower in self.after[i]:
                above[follower] |= above[i] | 1 << i
        below = [0] * count
        for i in reversed(range(count)):
            for follower in self.after[i]:
                below[i] |= below[follower] | 1 << follower
        floor = 0
        for i in range(count):
            ran = above[i] | 1 << i
            to_come = below[i] | 1 << i
            certain = self.workspace[i]
            for j in range(i + 1):
                if ran >> j & 1:
                    certain += self.allocated[j]
            for mask, nbytes, allocator in self.freed:
                if not mask & to_come and (not allocator or allocator & ran):
                    certain -= nbytes
            floor = max(floor, certain)
        return floor
