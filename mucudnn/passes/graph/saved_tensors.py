"""Which forward results are saved for the backward pass, and from when to when."""

from dataclasses import dataclass

from mucudnn.ir.graph import Graph, Node, Phase, Role

__all__ = ["Saved", "saved_tensors"]


@dataclass(frozen=True, slots=True)
class Saved:
    """A forward result that the backward pass reads.

    Attributes:
        name: The tensor.
        nbytes: Its size.
        producer: What computes it.
        first: Position of its producer among the graph's nodes.
        last: Position of its last forward use.
        again: Position of its first backward use.
    """

    name: str
    nbytes: int
    producer: Node
    first: int
    last: int
    again: int


def saved_tensors(graph: Graph) -> tuple[Saved, ...]:
    """Forward results that backward nodes read, in order of production.

    Views count for the tensor whose bytes they are. Inputs, parameters and state are
    not among them.
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
