"""Append the backward pass to a forward graph.

Nodes are visited in reverse; each appends its gradient by the rule of its operation
(`gradients`) to one flat list (`tape`).
"""

from types import MappingProxyType

from mucudnn.errors import PlanningError
from mucudnn.ir.graph import Graph, Role
from mucudnn.passes.graph.gradients import RULES
from mucudnn.passes.graph.tape import LOSS_SCALE, Tape

__all__ = ["LOSS_SCALE", "RULES", "Tape", "training_graph"]


def training_graph(
    forward: Graph, loss: str | None = None, *, loss_scale: float | None = 1.0
) -> Graph:
    """Return the forward graph followed by the gradients of a loss.

    Args:
        forward: A network.
        loss: A scalar tensor of the network; by default its first output.
        loss_scale: Gradient of the loss itself. None makes it an input called
            `loss_scale`, for mixed precision.

    Returns:
        The training graph; its `gradients` map every parameter the loss depends on to
        the parameter's gradient. The outputs are those of the forward graph.

    Raises:
        ValueError: The loss is not a computed scalar of the graph.
        PlanningError: An operation on the path has no gradient.
    """
    loss = forward.outputs[0] if loss is None else loss
    if loss not in forward.producers or forward.tensors[loss].shape != ():
        raise ValueError(f"the loss {loss!r} is no scalar that the graph computes")
    tape = Tape(forward)
    tape.seed(loss, loss_scale)
    for node in reversed(forward.nodes):
        if not any(name in tape.gradients for name in node.outputs):
            continue
        rule = RULES.get(node.op)
        if rule is None:
            raise PlanningError(f"operation {node.op!r} ({node.name}) has no gradient")
        rule(tape, node)
    gradients = {
        spec.name: tape.gradients[spec.name]
        for spec in forward.with_role(Role.PARAMETER)
        if spec.name in tape.gradients
    }
    return Graph(
        MappingProxyType(tape.tensors),
        tuple(tape.nodes),
        forward.outputs,
        MappingProxyType(gradients),
        forward.initializers,
    )
