"""Orders in which nodes run, by name.

Every order respects all `dependencies`, so that results are bit-identical. The forward
nodes of a training graph stay before its other nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from mucudnn.ir.graph import Graph, Phase
from mucudnn.passes.graph.dependencies import dependencies
from mucudnn.passes.ordering.footprint import Footprint
from mucudnn.passes.ordering.least_peak import STATE_LIMIT, improved
from mucudnn.passes.registry import Strategies, name_of

__all__ = [
    "ORDERS",
    "Order",
    "builder",
    "depth_first",
    "least_peak",
    "ordered",
    "parts",
]


class Order(Protocol):
    """A function that reorders the nodes of a graph."""

    def __call__(
        self, graph: Graph, workspaces: Mapping[str, int] | None = None
    ) -> Graph:
        """Return the same nodes in another order; `workspaces` are scratch bytes."""
        ...


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
            f"order {name_of(order)!r} returned {found!r}; a graph with the same nodes "
            "is wanted"
        )
    if found is not graph and {n.name for n in found.nodes} != {*graph.positions}:
        raise ValueError(
            f"order {name_of(order)!r} returned {len(found.nodes)} nodes that are not "
            f"the {len(graph.nodes)} it was given"
        )
    return found
