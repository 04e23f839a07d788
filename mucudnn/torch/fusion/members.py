"""Which nodes may be part of a fused one.

Nodes that Inductor computes in its own loops: pointwise operations, reductions,
normalisations, losses and fills. Never a matrix product or a convolution, no random
numbers, and no unknown operation. A node that mutates one tensor of a step's state may
be fused: Inductor writes over the old value. Views are no members: they cost nothing.
"""

from typing import Any

import torch

from mucudnn.ir.graph import Node
from mucudnn.torch.costs.measure import is_view
from mucudnn.torch.lowering.lowered import NOTHING, Call, Lowered, Number, Operand
from mucudnn.torch.plan_store import Unnameable, described

COPY = torch.ops.aten.copy_.default
"""The operation that stores a value in a tensor that outlives the step."""

_TAGS = frozenset({torch.Tag.pointwise, torch.Tag.reduction})

_OTHERS = frozenset(
    {
        "_batch_norm_no_update",
        "_batch_norm_with_update_functional",
        "_log_softmax",
        "_log_softmax_backward_data",
        "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit_no_training",
        "_softmax",
        "_softmax_backward_data",
        "_to_copy",
        "arange",
        "batch_norm_backward",
        "elu_backward",
        "fill",
        "full",
        "full_like",
        "hardsigmoid",
        "hardsigmoid_backward",
        "hardswish",
        "hardswish_backward",
        "hardtanh",
        "hardtanh_backward",
        "leaky_relu_backward",
        "mse_loss",
        "mse_loss_backward",
        "native_batch_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "new_zeros",
        "nll_loss_backward",
        "nll_loss_forward",
        "ones_like",
        "scalar_tensor",
        "select_backward",
        "slice_backward",
        "zeros",
        "zeros_like",
    }
)
"""Names in `aten` of fusible operations without either tag."""


def fusible(lowered: Lowered, node: Node) -> bool:
    """Return whether a node may be computed as part of another."""
    call, traits, tensors = lowered.calls[node.name], node.traits, lowered.graph.tensors
    if call is NOTHING or is_view(lowered, node) or call.random or traits.random:
        return False
    if traits.expensive or not (traits.recomputable and traits.movable):
        return False
    if not _plain(call) or any(
        lowered.layouts[name].dtype.is_complex for name in node.tensors
    ):
        return False
    if node.mutates:
        return len(node.mutates) == 1 and _stores(lowered, node)
    own = all(tensors[name].alias is None for name in node.outputs)
    return bool(node.outputs) and own and _known(call.function)


def passes_through(lowered: Lowered, node: Node) -> bool:
    """Return whether a node is a view that may be taken inside and outside."""
    return (
        is_view(lowered, node)
        and not node.mutates
        and bool(node.outputs)
        and _plain(lowered.calls[node.name])
    )


def used_operands(value: Any) -> set[int]:
    """Return the operands that arguments name."""
    match value:
        case Operand(index):
            return {index}
        case Number(_, args):
            return used_operands(args)
        case list() | tuple():
            return set().union(*map(used_operands, value))
        case _:
            return set()


def _stores(lowered: Lowered, node: Node) -> bool:
    """Return whether a node stores a value that can be computed beside the old one."""
    call, tensors = lowered.calls[node.name], lowered.graph.tensors
    if call.function is COPY:
        return not node.outputs and call.args == (Operand(0), Operand(1))
    return (
        len(node.outputs) == 1
        and lowered.graph.storages[node.outputs[0]]
        == lowered.graph.storages[node.mutates[0]]
        and tensors[node.outputs[0]].alias in node.inputs
        and _known(call.function)
    )


def _known(function: Any) -> bool:
    if not isinstance(function, torch._ops.OpOverload) or function.namespace != "aten":
        return False
    name = function._schema.name.removeprefix("aten::")
    return not _TAGS.isdisjoint(function.tags) or name in _OTHERS


def _plain(call: Call) -> bool:
    """Return whether all arguments are operands, numbers of these, and constants."""

    def plain(value: Any) -> bool:
        match value:
            case torch.Tensor():
                return False
            case Number(function, args):
                try:
                    described(function)
                except Unnameable:
                    return False
                return plain(args)
            case list() | tuple():
                return all(map(plain, value))
            case _:
                return True

    operator = isinstance(call.function, torch._ops.OpOverload)
    return operator and plain((call.args, tuple(call.kwargs.values())))
