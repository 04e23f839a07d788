"""Number of parts of each node such that slices stay below a limit in bytes.

Early layers of a network are large and late ones small, so each node gets the smallest
power of two that keeps its tensors below the limit. Short stretches of smaller nodes
are split like their neighbours, as joining and splitting rows again costs copies.
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
"""Number of parts: by node name, by a function of the node, or the same for all."""

_WINDOW = 10
"""Shorter stretches of nodes with fewer parts are split like their neighbours."""

_WINDOW_OF_STRIPS = 3
"""The same for spatial tiles: fewer parts also mean fewer halo rows read twice."""

_OF_STEP = (Role.ACTIVATION, Role.GRADIENT, Role.INPUT)


def parts_by_bytes(
    graph: Graph,
    limit: float,
    *,
    most: int | None = None,
    window: int | None = None,
    along: Along | None = None,
) -> Mapping[str, int]:
    """Return the number of parts of each node that keeps slices below a limit in bytes.

    There are at most `most` parts (by default the number of samples), and stretches of
    up to `window` nodes with fewer parts are split like their neighbours.

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
    splittable = cuttable(graph, along)
    sizes = _rows_bytes(graph, splittable, along)
    needed = [
        _parts(nbytes, limit, most) if node.name in splittable else 1
        for node, nbytes in zip(graph.nodes, sizes, strict=True)
    ]
    grown = _window_filter(max, needed, window)
    closed = _window_filter(min, grown, window)
    return {
        node.name: max(needed[i], closed[i])
        for i, node in enumerate(graph.nodes)
        if node.name in splittable
    }


def asked_of(parts: Parts) -> Callable[[Node], int]:
    """Return a function from a node to its requested number of parts.

    Raises:
        ValueError: A number is below 1; for a function, raised when it is called.
        TypeError: A number is not an integer.
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
    """Return the bytes of the largest tensor that a node that can be split touches."""
    along = along_batch(graph) if along is None else along
    return max(_rows_bytes(graph, cuttable(graph, along), along), default=0)


def _parts(size: int, limit: float, most: int) -> int:
    parts = 1
    while parts < most and size / parts > limit:
        parts = min(2 * parts, most)
    return parts


def _rows_bytes(graph: Graph, splittable: frozenset[str], along: Along) -> list[int]:
    """Return the bytes of each node's largest tensor with rows; 0 for other nodes."""
    tensors = graph.tensors

    def rows(node: Node) -> Iterator[TensorSpec]:
        how = cut_as(tensors, node, along)
        if how is None:  # the node is decomposed
            yield from filter(along.cuts, (tensors[name] for name in node.tensors))
            return
        for name, axis in zip(node.tensors, (*how.inputs, *how.outputs), strict=True):
            if axis is not None:
                yield tensors[name]

    return [
        max((s.nbytes for s in rows(node) if s.role in _OF_STEP), default=0)
        if node.name in splittable
        else 0
        for node in graph.nodes
    ]


def _window_filter(
    choose: Callable[[Sequence[int]], int], values: Sequence[int], window: int
) -> list[int]:
    return [
        choose(values[max(0, i - window) : i + window + 1]) for i in range(len(values))
    ]
