"""A network that only answers: no loss, no gradients, no labels."""

from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph

__all__ = ["up_to"]


def up_to(graph: Graph, *outputs: str) -> Graph:
    """The nodes of a forward graph that some of its tensors follow from.

    Args:
        graph: A forward graph.
        outputs: Its tensors, which become its results.

    Raises:
        ValueError: It has no such tensor.
    """
    for name in outputs:
        if name not in graph.tensors:
            raise ValueError(f"there is no tensor {name!r}")
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
