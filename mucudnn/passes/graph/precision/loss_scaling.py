"""Dynamic loss scaling within the step: the scale is state on the device.

The gradient of the loss is a scalar of the state. Before the first update all gradients
are checked for infinities and NaNs; if there are any, a flag makes the updates no-ops.
The last node adjusts the scale for the next step. The host never synchronizes with the
device.
"""

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node, Phase, Role, TensorSpec
from mucudnn.ir.initializers import Constant
from mucudnn.ir.loss_scaling import DynamicLossScale
from mucudnn.ir.operations import make_node
from mucudnn.passes.graph.tape import LOSS_SCALE

__all__ = ["COUNTS", "adjusting", "looking_for_overflow", "with_scale_as_state"]

COUNTS = "loss_scale:counts"
"""Name of a tensor of three int64: whether a gradient overflowed, steps since the last
overflow or growth of the scale, and the number of skipped steps."""


def with_scale_as_state(graph: Graph, scaling: DynamicLossScale) -> Graph:
    """Return a training graph whose loss scale is state instead of an input."""
    scale = replace(graph.tensors[LOSS_SCALE], role=Role.STATE)
    scaling.range_in(scale.dtype)
    counts = TensorSpec(COUNTS, (3,), "int64", Role.STATE)
    return replace(
        graph,
        tensors=MappingProxyType({**graph.tensors, LOSS_SCALE: scale, COUNTS: counts}),
        initializers=MappingProxyType(
            {
                **graph.initializers,
                LOSS_SCALE: Constant(scaling.initial),
                COUNTS: Constant(0.0),
            }
        ),
    )


def looking_for_overflow(graph: Graph, gradients: Iterable[str]) -> tuple[Node, ...]:
    """Return the nodes that check gradients for overflow."""
    return tuple(
        make_node(
            graph.tensors,
            name=f"{gradient}:overflow",
            op="find_overflow",
            inputs=(gradient, COUNTS),
            outputs=(),
            attrs=MappingProxyType({}),
            phase=Phase.UPDATE,
            mutates=(COUNTS,),
        )
        for gradient in dict.fromkeys(gradients)
    )


def adjusting(graph: Graph, scaling: DynamicLossScale) -> Node:
    """Return the node that adjusts the scale for the next step."""
    least, most = scaling.range_in(graph.tensors[LOSS_SCALE].dtype)
    attrs = {
        "growth": scaling.growth,
        "backoff": scaling.backoff,
        "interval": scaling.interval,
        "least": least,
        "most": most,
    }
    return make_node(
        graph.tensors,
        name="loss_scale:adjust",
        op="adjust_loss_scale",
        inputs=(LOSS_SCALE, COUNTS),
        outputs=(),
        attrs=MappingProxyType(attrs),
        phase=Phase.UPDATE,
        mutates=(LOSS_SCALE, COUNTS),
    )
