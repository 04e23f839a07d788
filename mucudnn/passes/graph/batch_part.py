"""Adapt a training step to one rank, whose batch is a row range of the global batch.

A rank's graph is built for its own rows. Random numbers depend on an element's position
in the global batch, so that a rank draws the same numbers as a single device. Batch
normalisation may be decomposed, so that the statistics of all ranks can be merged in
between.
"""

from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.traits import Rows
from mucudnn.passes.graph.pieces import pieces_of

__all__ = ["drawing_rows", "in_pieces"]


def drawing_rows(graph: Graph, rows: Rows) -> Graph:
    """Return a step that draws the random numbers of a row range of a larger batch."""
    nodes = tuple(_drawing(graph, node, rows) for node in graph.nodes)
    return replace(graph, nodes=nodes)


def in_pieces(graph: Graph) -> Graph:
    """Return a step whose cross-sample operations are decomposed."""
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
