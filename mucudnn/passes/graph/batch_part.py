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

__all__ = ["drawing_rows", "in_pieces"]


def drawing_rows(graph: Graph, rows: Rows) -> Graph:
    """A step with the random numbers of its rows of a larger batch.

    Args:
        graph: A training graph for that many rows, without updates.
        rows: Which they are.
    """
    nodes = tuple(_drawing(graph, node, rows) for node in graph.nodes)
    return replace(graph, nodes=nodes)


def in_pieces(graph: Graph) -> Graph:
    """A step whose nodes fall into pieces where their samples depend on each other."""
    tensors = dict(graph.tensors)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.traits.batch is not None:
            nodes.append(node)
            continue
        between, pieces = pieces_of(tensors, node)
        tensors.update((spec.name, spec) for spec in between)
        nodes += pieces or (node,)
    return replace(graph, tensors=MappingProxyType(tensors), nodes=tuple(nodes))


def _drawing(graph: Graph, node: Node, rows: Rows) -> Node:
    how = node.traits.batch
    if not node.traits.random or how is None or how.sliced is None:
        return node
    inputs = [graph.tensors[name] for name in node.inputs]
    attrs = how.sliced(node.attrs, inputs, rows)
    return replace(node, attrs=MappingProxyType(dict(attrs)))
