"""The step of one rank, whose batch is some rows of that of all ranks together.

A rank's graph is built for its own rows. What it draws at random follows from an
element's position, so it is told where in the whole batch its rows begin: it draws what
one device draws for them. Batch normalisation may fall into pieces, between which the
statistics of all ranks can be merged.
"""

from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.traits import Rows
from mucudnn.passes.graph.pieces import pieces_of

__all__ = ["part_of_batch"]


def part_of_batch(graph: Graph, rows: Rows, *, in_pieces: bool = False) -> Graph:
    """A step with the random numbers of its rows of a larger batch.

    Args:
        graph: A training graph for that many rows, without updates.
        rows: Which they are.
        in_pieces: Whether nodes whose samples depend on each other fall into pieces.
    """
    tensors = dict(graph.tensors)
    nodes: list[Node] = []
    for node in graph.nodes:
        if in_pieces and node.traits.pieces is not None:
            between, pieces = pieces_of(tensors, node)
            tensors.update((spec.name, spec) for spec in between)
            nodes += pieces
        else:
            nodes.append(_drawing(graph, node, rows))
    return replace(graph, tensors=MappingProxyType(tensors), nodes=tuple(nodes))


def _drawing(graph: Graph, node: Node, rows: Rows) -> Node:
    how = node.traits.batch
    if not node.traits.random or how is None or how.sliced is None:
        return node
    inputs = [graph.tensors[name] for name in node.inputs]
    attrs = how.sliced(node.attrs, inputs, rows)
    return replace(node, attrs=MappingProxyType(dict(attrs)))
