"""Into how many parts each node of a step is cut, by a limit on bytes.

The early layers of a network are large and its late ones small, so they are not cut
alike: a node gets as many parts as keep each of its tensors below the limit, a power of
two. What is smaller for a few nodes only is cut like its neighbours, because rows that
are put together and cut again cost copies.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from mucudnn.arguments import an_integer
from mucudnn.ir.graph import Graph, Node, Role
from mucudnn.ir.tensor import TensorSpec
from mucudnn.passes.graph.slicing.axis import (
    SAMPLES,
    Along,
    along_batch,
    cut_as,
    cuttable,
)

__all__ = ["Parts", "asked_of", "largest_rows", "parts_by_bytes"]

Parts = Mapping[str, int] | Callable[[Node], int] | int
"""Into how many parts nodes are cut: each by its name, by a function, or all alike."""

_WINDOW = 10
"""Nodes that a stretch of fewer parts must be longer than, to be cut otherwise."""

_WINDOW_OF_STRIPS = 3
"""The same for strips: the fewer they are, the fewer rows are read twice."""

_OF_STEP = (Role.ACTIVATION, Role.GRADIENT, Role.INPUT)


def parts_by_bytes(
    graph: Graph,
    limit: float,
    *,
    most: int | None = None,
    window: int | None = None,
    along: Along | None = None,
) -> Mapping[str, int]:
    """Parts of each node so that rows of its tensors stay below a limit.

    Args:
        graph: A training graph without updates that nothing has made in-place yet.
        limit: Bytes of the largest tensor that a slice of a node touches.
        most: Parts that are never exceeded; by default as many as there are samples.
        window: Nodes within which stretches of fewer parts are not told apart.
        along: What nodes are cut along; by default their batch.

    Raises:
        ValueError: The limit is not positive.
    """
    if limit <= 0:
        raise ValueError(f"slices have some bytes: the limit must be positive, {limit}")
    along = along_batch(graph) if along is None else along
    if window is None:
        window = _WINDOW if along.axis == SAMPLES else _WINDOW_OF_STRIPS
    size = along.size
    most = size if most is None else min(size, an_integer("most", most, least=1))
    able = cuttable(graph, along)
    sizes = _rows_bytes(graph, able, along)
    needed = [
        _parts(nbytes, limit, most) if node.name in able else 1
        for node, nbytes in zip(graph.nodes, sizes, strict=True)
    ]
    wide = _over(max, needed, window)
    closed = _over(min, wide, window)
    return {
        node.name: max(needed[i], closed[i])
        for i, node in enumerate(graph.nodes)
        if node.name in able
    }


def asked_of(parts: Parts) -> Callable[[Node], int]:
    """How many parts are asked of a node.

    Raises:
        ValueError: One is below 1, which of a function shows when it is called.
        TypeError: One is no whole number.
    """
    if isinstance(parts, Mapping):
        for number in parts.values():
            an_integer("parts", number, least=1)
        return lambda node: parts.get(node.name, 1)
    if callable(parts):
        return lambda node: an_integer("parts", parts(node), least=1)
    number = an_integer("parts", parts, least=1)
    return lambda node: number


def largest_rows(graph: Graph, along: Along | None = None) -> int:
    """Bytes of the largest tensor that a node which can be cut touches."""
    along = along_batch(graph) if along is None else along
    return max(_rows_bytes(graph, cuttable(graph, along), along), default=0)


def _parts(size: int, limit: float, most: int) -> int:
    parts = 1
    while parts < most and size / parts > limit:
        parts = min(2 * parts, most)
    return parts


def _rows_bytes(graph: Graph, able: frozenset[str], along: Along) -> list[int]:
    """Bytes of the largest tensor of every node that has rows; 0 of others."""
    tensors = graph.tensors

    def rows(node: Node) -> Iterator[TensorSpec]:
        how = cut_as(tensors, node, along)
        if how is None:  # it falls into pieces
            yield from filter(along.cuts, (tensors[name] for name in node.tensors))
            return
        for name, axis in zip(node.tensors, (*how.inputs, *how.outputs), strict=True):
            if axis is not None:
                yield tensors[name]

    return [
        max((s.nbytes for s in rows(node) if s.role in _OF_STEP), default=0)
        if node.name in able
        else 0
        for node in graph.nodes
    ]


def _over(
    choose: Callable[[Sequence[int]], int], values: Sequence[int], window: int
) -> list[int]:
    return [
        choose(values[max(0, i - window) : i + window + 1]) for i in range(len(values))
    ]
