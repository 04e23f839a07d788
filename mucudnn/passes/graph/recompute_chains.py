"""Recompute chains: the nodes that have to run again to restore a dropped tensor."""

import math
from collections.abc import Callable

from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.profile import Profile

__all__ = ["is_checkpoint", "recompute_chain", "recompute_ms"]


def recompute_chain(
    graph: Graph, tensor: str, available: Callable[[str], bool]
) -> tuple[Node, ...]:
    """Return the nodes to run again, in order, to recompute a tensor.

    Args:
        graph: A training graph.
        tensor: The dropped tensor.
        available: Whether a storage is resident when the tensor is needed again.
            Inputs, parameters and tensors that cannot be recomputed always are.
    """
    needed: dict[str, Node] = {}
    pending = [tensor]
    while pending:
        name = pending.pop()
        node = graph.producers.get(name)
        if node is None or node.name in needed or not node.remakes(name):
            continue
        if name != tensor and available(graph.storages[name]):
            continue
        needed[node.name] = node
        pending += node.inputs
    return tuple(sorted(needed.values(), key=lambda node: graph.positions[node.name]))


def recompute_ms(
    graph: Graph, profile: Profile, tensor: str, available: Callable[[str], bool]
) -> float:
    """Return the time of a recompute chain; infinity if there is none."""
    if not graph.producers[tensor].remakes(tensor):
        return math.inf
    chain = recompute_chain(graph, tensor, available)
    return sum(profile.again_ms(node.name) for node in chain)


def is_checkpoint(graph: Graph, tensor: str, saved: Callable[[str], bool]) -> bool:
    """Return whether a tensor's bytes are worth saving rather than recomputing.

    Checkpoints are results of expensive nodes and joins of branches, results that
    overwrite them in place, and results that cannot be recomputed.
    """
    while True:
        node = graph.producers.get(tensor)
        if node is None or not node.recomputable:
            return True
        if node.traits.expensive or node.traits.joint:
            return True
        source = _source(graph, node, tensor)
        if source is None or saved(source):
            return False
        tensor = source


def _source(graph: Graph, node: Node, tensor: str) -> str | None:
    """Return the input whose bytes a result shares, or could share."""
    if node.traits.view:
        storages = graph.storages
        return next(t for t in node.inputs if storages[t] == storages[tensor])
    if node.traits.overwrites and tensor == node.outputs[0]:
        return node.inputs[node.traits.overwrites[0]]
    return None
