"""Node orders: as built, depth-first, or with the least peak memory.

Every order respects all `dependencies`, so that results are bit-identical. The forward
nodes of a training graph stay before its other nodes.
"""

import bisect
import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mucudnn.ir.graph import Graph, Phase
from mucudnn.passes.liveness import dependencies, live_ranges
from mucudnn.passes.registry import Strategies, name_of

STATE_LIMIT = 20_000
"""Sets of nodes that an exact search visits before it gives up."""


Order = Callable[[Graph, Mapping[str, int] | None], Graph]
"""(graph, scratch bytes by node) -> the graph with the same nodes in another order."""


def builder(graph: Graph, workspaces: Mapping[str, int] | None = None) -> Graph:
    """Keep the order as built: layer by layer, the backward pass in reverse."""
    del workspaces
    return graph


def depth_first(graph: Graph, workspaces: Mapping[str, int] | None = None) -> Graph:
    """Finish one branch before the next; a join waits for all of its branches.

    The route of SuperNeurons (Wang et al. 2018, section 3.1): after a fork its second
    to last branches are walked first and its first branch, the shortcut, last. What
    leads nowhere (the gradient of a weight) belongs to its layer and comes first. The
    backward pass is walked by the same rule.
    """
    del workspaces
    return _reordered(graph, _depth_first(graph))


def least_peak(
    graph: Graph,
    workspaces: Mapping[str, int] | None = None,
    *,
    state_limit: int = STATE_LIMIT,
) -> Graph:
    """Minimise the peak of memory, exactly if the search completes.

    The search starts from the best of the builder's, the depth-first and a greedy
    order, and improves it around the peak: exactly if that takes at most `state_limit`
    states, else window by window. The peak is never above that of the builder's order.
    """
    footprint = Footprint.of(graph, workspaces)
    bounds = parts(graph)
    greedy = [n for a, b in bounds for n in footprint.greedy(range(a, b))]
    candidates = (range(len(graph.nodes)), _depth_first(graph), greedy)
    best = min(candidates, key=footprint.peak)
    return _reordered(graph, improved(footprint, best, bounds, state_limit))


def parts(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Return the position ranges that nodes stay in: forward nodes, then all others."""
    end = len(graph.nodes)
    forward = [node.phase is Phase.FORWARD for node in graph.nodes]
    boundary = sum(forward)
    if not all(forward[:boundary]):
        return ((0, end),)
    return tuple((a, b) for a, b in ((0, boundary), (boundary, end)) if a < b)


def _reordered(graph: Graph, order: Sequence[int]) -> Graph:
    return replace(graph, nodes=tuple(graph.nodes[position] for position in order))


def _depth_first(graph: Graph) -> list[int]:
    before = dependencies(graph)
    route: list[int] = []
    for start, stop in parts(graph):
        # Dependencies across the boundary of two parts are always met.
        after: list[list[int]] = [[] for _ in range(start, stop)]
        waits = []
        for node in range(start, stop):
            inside = [p for p in before[node] if p >= start]
            waits.append(len(inside))
            for p in inside:
                after[p - start].append(node)
        roots = [n for n in range(start, stop) if not waits[n - start]]
        stack = roots[::-1]
        while stack:
            node = stack.pop()
            route.append(node)
            ready = []
            for follower in after[node - start]:
                waits[follower - start] -= 1
                if not waits[follower - start]:
                    ready.append(follower)
            # Popped from the end: leaves, then branches, the first of them last.
            leaves = [n for n in ready if not after[n - start]]
            branches = [n for n in ready if after[n - start]]
            stack += branches[:1] + branches[:0:-1] + leaves[::-1]
    return route


ORDERS: Strategies[Order] = Strategies("order", (builder, depth_first, least_peak))
"""Orders by name; `register` adds more."""


def ordered(
    order: str | Order, graph: Graph, workspaces: Mapping[str, int] | None = None
) -> Graph:
    """Apply an order, possibly a user's, and check the result.

    Raises:
        TypeError: The order did not return a graph.
        ValueError: The order is unknown, or dropped, added or misplaced nodes.
    """
    found: object = ORDERS.resolve(order)(graph, workspaces)
    if not isinstance(found, Graph):
        raise TypeError(
            f"order {name_of(order)!r} returned {found!r}; it must return a graph "
            "with the same nodes"
        )
    if found is not graph and {n.name for n in found.nodes} != {*graph.positions}:
        raise ValueError(
            f"order {name_of(order)!r} returned {len(found.nodes)} nodes that are not "
            f"the {len(graph.nodes)} it was given"
        )
    return found


# Memory curve of an order of nodes.
#
# Nodes are numbered by their positions in the graph as built. The bytes a node
# allocates are the same in every valid order, as the first node to touch a storage is
# the one that writes it; the bytes it frees depend on which users are still to come.


_CHOICES = 64


@dataclass(frozen=True, slots=True)
class Footprint:
    """Dependencies and sizes that determine the memory curve of any order.

    Attributes:
        before: Dependencies of each node.
        after: Dependents of each node.
        allocated: Bytes that each node allocates.
        workspace: Scratch bytes of each node.
        touched: Storages each node uses that are freed within the step.
        users: Nodes that use each storage, ascending.
        sizes: Bytes of each storage.
        owner: Node that allocates each storage; -1 if allocated at the start.
        start: Bytes in use before the first node.
    """

    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    allocated: tuple[int, ...]
    workspace: tuple[int, ...]
    touched: tuple[tuple[int, ...], ...]
    users: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    owner: tuple[int, ...]
    start: int

    @classmethod
    def of(cls, graph: Graph, workspaces: Mapping[str, int] | None) -> "Footprint":
        """Return the footprint of a graph."""
        end = len(graph.nodes)
        before = dependencies(graph)
        after: list[list[int]] = [[] for _ in before]
        for node, earlier in enumerate(before):
            for p in earlier:
                after[p].append(node)
        # Inputs exist from the start; others are allocated by their first node.
        present = {graph.storages[name] for name in graph.inputs}
        numbers: dict[str, int] = {}
        owner = []
        allocated = [0] * end
        start = 0
        for name, live in live_ranges(graph).items():
            nbytes = graph.tensors[name].nbytes
            if name in present:
                start += nbytes
            else:
                allocated[live.first] += nbytes
            # Only storages that are freed within the step have a number.
            if live.last < end:
                numbers[name] = len(numbers)
                owner.append(-1 if name in present else live.first)
        touched = [
            tuple(
                numbers[s]
                for s in dict.fromkeys(graph.storages[t] for t in node.tensors)
                if s in numbers
            )
            for node in graph.nodes
        ]
        users: list[list[int]] = [[] for _ in numbers]
        for node, storages in enumerate(touched):
            for s in storages:
                users[s].append(node)
        return cls(
            before=before,
            after=tuple(map(tuple, after)),
            allocated=tuple(allocated),
            workspace=tuple((workspaces or {}).get(n.name, 0) for n in graph.nodes),
            touched=tuple(touched),
            users=tuple(map(tuple, users)),
            sizes=tuple(graph.tensors[name].nbytes for name in numbers),
            owner=tuple(owner),
            start=start,
        )

    def curve(self, order: Sequence[int]) -> list[int]:
        """Return the bytes in use at each node of a complete order."""
        left = [len(nodes) for nodes in self.users]
        used, result = self.start, []
        for node in order:
            used += self.allocated[node]
            result.append(used + self.workspace[node])
            for s in self.touched[node]:
                left[s] -= 1
                if not left[s]:
                    used -= self.sizes[s]
        return result

    def peak(self, order: Sequence[int]) -> int:
        """Return the peak of a complete order in bytes."""
        return max(self.curve(order), default=self.start)

    def greedy(self, nodes: Iterable[int]) -> list[int]:
        """Order some nodes greedily.

        Among the ready nodes that do not raise the peak, the one that leaves the least
        memory in use runs next; if all raise it, the one that raises it least. Only the
        first 64 ready nodes are considered.
        """
        inside = set(nodes)
        waits = {n: sum(p in inside for p in self.before[n]) for n in inside}
        # Count the users to come; -1 where the last is not among the nodes, so that
        # none of them frees the storage.
        left = [0] * len(self.users)
        for s, users in enumerate(self.users):
            left[s] = sum(n in inside for n in users) if users[-1] in inside else -1
        ready = sorted(n for n in inside if not waits[n])
        used = peak = 0
        order = []

        def cost(node: int) -> tuple[int, int, int]:
            need = used + self.allocated[node] + self.workspace[node]
            freed = sum(self.sizes[s] for s in self.touched[node] if left[s] == 1)
            return max(need, peak), self.allocated[node] - freed, node

        while ready:
            high, change, node = min(map(cost, itertools.islice(ready, _CHOICES)))
            order.append(node)
            ready.remove(node)
            used, peak = used + change, high
            for s in self.touched[node]:
                left[s] -= 1
            for follower in self.after[node]:
                if follower in waits:
                    waits[follower] -= 1
                    if not waits[follower]:
                        bisect.insort(ready, follower)
        return order


# Search for the order of nodes with the lowest peak memory.
#
# The bytes in use between two nodes depend only on the set of nodes that have run, not
# on their order. An order is therefore a path through such sets, and the lowest peak is
# a shortest path whose length is its highest step (dynamic programming over sets, as in
# Ahn et al. 2020, `Ordering Chaos`, section 3). Three rules keep the sets few without
# losing the optimum:
#
# * Nodes that are ordered with respect to all others divide a graph into pieces with
# independent peaks. * A ready node that does not raise the peak and leaves no more
# memory in use than before   may run at once: moved to the front of any order it raises
# no step. * The search stops at a lower bound: the largest footprint a node has in
# every order.


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
    # Rearrange the piece with the peak until the peak stays where it is.
    for _ in range(len(pieces) + _ROUNDS):
        curve = footprint.curve(result)
        top = max(range(len(curve)), key=curve.__getitem__, default=-1)
        piece = next((p for p in pieces if p[0] <= top < p[1]), None)
        if piece is None:
            break
        better, exact = None, False
        if piece not in given_up:
            better, exact = _search_window(footprint, result, piece, state_limit)
            if not exact:
                given_up.add(piece)
        if better is not None:
            result[slice(*piece)] = better
        # An exact search without a result has shown that the piece cannot be better.
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
            better, _ = _search_window(footprint, order, window, _WINDOW_STATES)
            if better is not None:
                order[slice(*window)] = better
                return True
    return False


def _search_window(
    footprint: Footprint, order: Sequence[int], window: tuple[int, int], states: int
) -> tuple[list[int] | None, bool]:
    """Search for the order of consecutive nodes with the lowest peak, best first.

    Within the window nodes are numbered from 0, sets of nodes are bit masks, and memory
    is relative to the bytes in use before the window.

    Args:
        footprint: Dependencies and sizes.
        order: The present order of all nodes.
        window: The range of positions to reorder.
        states: Sets of nodes that are visited at most.

    Returns:
        The best order below the present peak, or None; and whether the search was
        complete.
    """
    nodes = order[slice(*window)]
    count = len(nodes)
    index = {n: i for i, n in enumerate(nodes)}
    before = [
        sum(1 << index[p] for p in footprint.before[n] if p in index) for n in nodes
    ]
    after = [[index[f] for f in footprint.after[n] if f in index] for n in nodes]
    allocated = [footprint.allocated[n] for n in nodes]
    workspace = [footprint.workspace[n] for n in nodes]
    # A window can free a storage only if no later node uses it: set of users, bytes,
    # and set of the node that allocates it (empty if before the window).
    later = set(order[window[1] :])
    freed: dict[int, tuple[int, int, int]] = {}
    for s in sorted({s for n in nodes for s in footprint.touched[n]}):
        users, mine = footprint.users[s], index.get(footprint.owner[s])
        if later.isdisjoint(users):
            mask = sum(1 << index[n] for n in users if n in index)
            allocator = 0 if mine is None else 1 << mine
            freed[s] = mask, footprint.sizes[s], allocator
    frees = [[freed[s] for s in footprint.touched[n] if s in freed] for n in nodes]

    def used_after(i: int, used: int, rest: int) -> int:
        """Return the bytes in use after a node; `rest` has not run then."""
        used += allocated[i]
        for mask, nbytes, _ in frees[i]:
            if not mask & rest:
                used -= nbytes
        return used

    ceiling = used = done = 0
    for i in range(count):
        ceiling = max(ceiling, used + allocated[i] + workspace[i])
        done |= 1 << i
        used = used_after(i, used, ~done)
    floor = 0
    if count <= _BOUNDED:
        floor = _least_footprint(after, allocated, workspace, [*freed.values()])
    if floor >= ceiling:
        return None, True

    def steps(
        peak: int, used: int, done: int, ready: int
    ) -> list[tuple[int, int, int]]:
        """Return the possible next nodes: node, peak with it, bytes in use after it."""
        found = []
        while ready:
            bit = ready & -ready
            ready ^= bit
            i = bit.bit_length() - 1
            high = used + allocated[i] + workspace[i]
            then = used_after(i, used, ~(done | bit))
            # What neither raises the peak nor leaves more in use can always run first.
            if high <= peak and then <= used:
                return [(i, peak, then)]
            found.append((i, max(high, peak), then))
        return found

    whole = (1 << count) - 1
    ready = sum(1 << i for i, b in enumerate(before) if not b)
    # Of equal peaks, the state with the most nodes done is first.
    heap = [(floor, 0, 0, 0, ready)]
    reached: dict[int, tuple[int, int, int]] = {0: (floor, -1, 0)}
    closed: set[int] = set()
    while heap:
        peak, left, used, done, ready = heapq.heappop(heap)
        if done == whole:
            path = []
            while done:
                _, i, done = reached[done]
                path.append(nodes[i])
            return path[::-1], True
        if done in closed:
            continue
        if len(closed) >= states:
            return None, False
        closed.add(done)
        for i, high, used_then in steps(peak, used, done, ready):
            then = done | 1 << i
            # Keep states below the present peak that nothing reached with less.
            if high >= ceiling or (then in reached and reached[then][0] <= high):
                continue
            reached[then] = (high, i, done)
            ready_then = ready ^ 1 << i
            for follower in after[i]:
                if not before[follower] & ~then:
                    ready_then |= 1 << follower
            heapq.heappush(heap, (high, left - 1, used_then, then, ready_then))
    return None, True


def _least_footprint(
    after: Sequence[Sequence[int]],
    allocated: Sequence[int],
    workspace: Sequence[int],
    freed: Sequence[tuple[int, int, int]],
) -> int:
    """Return a lower bound of the peak: the largest footprint a node always has."""
    count = len(after)
    # Find the nodes that run before and behind every node in any order.
    above, below = [0] * count, [0] * count
    for i in range(count):
        for follower in after[i]:
            above[follower] |= above[i] | 1 << i
    for i in reversed(range(count)):
        for follower in after[i]:
            below[i] |= below[follower] | 1 << follower
    floor = 0
    for i in range(count):
        ran = above[i] | 1 << i
        to_come = below[i] | 1 << i
        # Everything allocated by then counts, unless all its users may have run.
        certain = workspace[i]
        certain += sum(allocated[j] for j in range(i + 1) if ran >> j & 1)
        for mask, nbytes, allocator in freed:
            if not mask & to_come and (not allocator or allocator & ran):
                certain -= nbytes
        floor = max(floor, certain)
    return floor
