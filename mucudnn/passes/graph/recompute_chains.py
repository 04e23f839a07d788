"""Recompute chains: what has to run again to have a dropped tensor back."""

import math
from collections.abc import Callable

from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.profile import Profile

__all__ = ["is_checkpoint", "recompute_chain", "recompute_ms"]


def recompute_chain(
    graph: Graph, tensor: str, available: Callable[[str], bool]
) -> tuple[Node, ...]:
    """Nodes to run again, in order, for a tensor, from what is available.

    Args:
        graph: A training graph.
        tensor: What is dropped.
        available: Whether a storage is still there when it is needed again; inputs and
            parameters always are, and what cannot be computed again.
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
    """Time of a recompute chain; infinity for what cannot be computed again."""
    if not graph.producers[tensor].remakes(tensor):
        return math.inf
    chain = recompute_chain(graph, tensor, available)
    return sum(profile.again_ms(node.name) for node in chain)


def is_checkpoint(graph: Graph, tensor: str, saved: Callable[[str], bool]) -> bool:
    """Whether a tensor's bytes are those of something expensive or of a joint.

    What can overwrite such a result in place counts for it. What cannot be computed
    again is a checkpoint, too.
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
    """The input whose bytes a result has, or could have."""
    if node.traits.view:
        storages = graph.storages
        return next(t for t in node.inputs if storages[t] == storages[tensor])
    if node.traits.overwrites and tensor == node.outputs[0]:
        return node.inputs[node.traits.overwrites[0]]
    return None
