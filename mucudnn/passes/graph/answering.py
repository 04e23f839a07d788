"""Inference graphs: a forward graph without loss, gradients and labels."""

from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph

__all__ = ["up_to"]


def up_to(graph: Graph, *outputs: str) -> Graph:
    """Return the part of a forward graph that computes some of its tensors."""
    for name in outputs:
        if name not in graph.tensors:
            raise ValueError(f"the graph has no tensor {name!r}")
    wanted, nodes = set(outputs), []
    for node in reversed(graph.nodes):
        if not wanted.isdisjoint(node.outputs):
            nodes.append(node)
            wanted.update(node.inputs)
    used = {name for node in nodes for name in node.tensors} | set(outputs)
    used |= {graph.storages[name] for name in used}
    tensors = {name: spec for name, spec in graph.tensors.items() if name in used}
    return replace(
        graph,
        tensors=MappingProxyType(tensors),
        nodes=tuple(reversed(nodes)),
        outputs=outputs,
    )
