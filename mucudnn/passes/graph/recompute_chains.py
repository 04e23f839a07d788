"""Recompute chains: what has to run again to have a dropped tensor back."""

from collections.abc import Callable

from mucudnn.ir.graph import Graph, Node

__all__ = ["EXPENSIVE", "is_checkpoint", "recompute_chain"]

EXPENSIVE = frozenset({"conv", "matmul"})
"""Operations whose results are worth more than their bytes."""

_JOINTS = frozenset({*EXPENSIVE, "add", "concat"})
"""Operations whose results other systems never compute again."""

_IN_PLACE = frozenset(
    {"bias", "relu", "leaky_relu", "sigmoid", "tanh", "dropout", "scale", "reshape"}
)
"""Operations that overwrite their input when nobody else needs it."""


def recompute_chain(
    graph: Graph, tensor: str, available: Callable[[str], bool]
) -> tuple[Node, ...]:
    """Nodes to run again, in order, for a tensor, from what is available.

    Args:
        graph: A training graph.
        tensor: What is dropped.
        available: Whether a storage is still there when it is needed again; inputs and
            parameters always are.
    """
    needed: dict[str, Node] = {}
    pending = [tensor]
    while pending:
        name = pending.pop()
        node = graph.producers.get(name)
        if node is None or node.name in needed:
            continue
        if name != tensor and available(graph.storages[name]):
            continue
        needed[node.name] = node
        pending += node.inputs
    return tuple(sorted(needed.values(), key=lambda node: graph.positions[node.name]))


def is_checkpoint(graph: Graph, tensor: str, saved: Callable[[str], bool]) -> bool:
    """Whether a tensor's bytes are those of a convolution, a product or a joint.

    What overwrites such a result in place counts for it.
    """
    while True:
        node = graph.producers.get(tensor)
        if node is None or node.op in _JOINTS:
            return True
        if node.op not in _IN_PLACE or saved(node.inputs[0]):
            return False
        tensor = node.inputs[0]
