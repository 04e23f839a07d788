"""Forward results saved for the backward pass, and when they are used."""

from dataclasses import dataclass

from mucudnn.ir.graph import Graph, Node, Phase, Role

__all__ = ["Saved", "saved_tensors"]


@dataclass(frozen=True, slots=True)
class Saved:
    """A forward result that the backward pass reads.

    Attributes:
        name: Name of the tensor.
        nbytes: Size of the tensor.
        producer: Node that computes the tensor.
        first: Position of the producer among the graph's nodes.
        last: Position of the last forward use.
        again: Position of the first backward use.
    """

    name: str
    nbytes: int
    producer: Node
    first: int
    last: int
    again: int


def saved_tensors(graph: Graph) -> tuple[Saved, ...]:
    """Return the forward results that backward nodes read, in order of production.

    Uses of views count as uses of the viewed tensor. Inputs, parameters and state are
    not included.
    """
    found = []
    for i, node in enumerate(graph.nodes):
        if node.phase is not Phase.FORWARD:
            continue
        for name in node.outputs:
            spec = graph.tensors[name]
            if spec.alias is not None or spec.role is not Role.ACTIVATION:
                continue
            uses = graph.reads.get(name, ())
            forward = [p for p in uses if graph.nodes[p].phase is Phase.FORWARD]
            backward = [p for p in uses if graph.nodes[p].phase is not Phase.FORWARD]
            if backward:
                last = forward[-1] if forward else i
                found.append(Saved(name, spec.nbytes, node, i, last, backward[0]))
    return tuple(found)
