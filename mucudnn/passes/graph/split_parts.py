"""Into how many parts each node of a step is cut, by a limit on bytes.

The early layers of a network are large and its late ones small, so they are not cut
alike: a node gets as many parts as keep each of its tensors below the limit, a power of
two. What is smaller for a few nodes only is cut like its neighbours, because rows that
are put together and cut again cost copies.
"""

from collections.abc import Callable, Mapping, Sequence

from mucudnn.arguments import an_integer
from mucudnn.ir.graph import Graph, Role
from mucudnn.passes.graph.split import batch_of, cuttable

__all__ = ["largest_rows", "parts_by_bytes"]

_WINDOW = 10
"""Nodes that a stretch of fewer parts must be longer than, to be cut otherwise."""

_OF_STEP = (Role.ACTIVATION, Role.GRADIENT, Role.INPUT)


def parts_by_bytes(
    graph: Graph, limit: float, *, most: int | None = None, window: int = _WINDOW
) -> Mapping[str, int]:
    """Parts of each node so that rows of its tensors stay below a limit.

    Args:
        graph: A training graph without updates that nothing has made in-place yet.
        limit: Bytes of the largest tensor that a slice of a node touches.
        most: Parts that are never exceeded; by default as many as there are samples.
        window: Nodes within which stretches of fewer parts are not told apart.

    Raises:
        ValueError: The limit is not positive.
    """
    if limit <= 0:
        raise ValueError(f"slices have some bytes: the limit must be positive, {limit}")
    batch = batch_of(graph)
    most = batch if most is None else min(batch, an_integer("most", most, least=1))
    able = cuttable(graph, batch)
    needed = [
        _parts(size, limit, most) if node.name in able else 1
        for node, size in zip(graph.nodes, _rows_bytes(graph, able, batch), strict=True)
    ]
    wide = _over(max, needed, window)
    closed = _over(min, wide, window)
    return {
        node.name: max(needed[i], closed[i])
        for i, node in enumerate(graph.nodes)
        if node.name in able
    }


def largest_rows(graph: Graph) -> int:
    """Bytes of the largest tensor that a node which can be cut touches."""
    batch = batch_of(graph)
    return max(_rows_bytes(graph, cuttable(graph, batch), batch), default=0)


def _parts(size: int, limit: float, most: int) -> int:
    parts = 1
    while parts < most and size / parts > limit:
        parts = min(2 * parts, most)
    return parts


def _rows_bytes(graph: Graph, able: frozenset[str], batch: int) -> list[int]:
    """Bytes of the largest tensor of every node that has rows; 0 of others."""

    def sizes(names: Sequence[str]) -> list[int]:
        specs = (graph.tensors[name] for name in names)
        return [
            spec.nbytes
            for spec in specs
            if spec.role in _OF_STEP and spec.shape and spec.shape[0] % batch == 0
        ]

    return [
        max(sizes(node.tensors), default=0) if node.name in able else 0
        for node in graph.nodes
    ]


def _over(
    choose: Callable[[Sequence[int]], int], values: Sequence[int], window: int
) -> list[int]:
    return [
        choose(values[max(0, i - window) : i + window + 1]) for i in range(len(values))
    ]
