"""Traits of all built-in operations, their gradients and updates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from mucudnn.ir.conv import Direction
from mucudnn.ir.graph import Node, Phase
from mucudnn.ir.norms.batch_norm import (
    PIECES,
    batch_norm_grad_pieces,
    batch_norm_pieces,
)
from mucudnn.ir.norms.fused_norm import FUSED_NORMS
from mucudnn.ir.norms.group_norm import (
    GROUP_PIECES,
    group_norm_grad_pieces,
    group_norm_pieces,
)
from mucudnn.ir.slices import box_rows, conv_rows, counted, drawn_rows
from mucudnn.ir.strips import strips_of
from mucudnn.ir.tensor import TensorSpec
from mucudnn.ir.traits import PLAIN, Again, Batch, NodeTraits, Operands as Whole

__all__ = [
    "EPILOGUE",
    "FUSIONS",
    "LIBRARY",
    "OPERATIONS",
    "make_node",
    "traits_of",
    "with_library",
]

Attributes = Mapping[str, Any]
Operands = Sequence[TensorSpec]
Rule = Callable[[Operands, Operands, Attributes], NodeTraits]
"""Function from inputs, results and attributes to traits."""

_NONE: Attributes = MappingProxyType({})
_OF_FIRST, _OF_LABELS = partial(counted, 0), partial(counted, 1)
_ROW = Batch((0,), (0,))
_ROWS = Batch((0, 0), (0,))
_FROM_ONE = NodeTraits(narrow=True, batch=_ROW)
_FROM_TWO = NodeTraits(batch=_ROWS)
_FUNCTION = NodeTraits(overwrites=(0,), narrow=True, batch=_ROW)
_OF_FUNCTION = NodeTraits(overwrites=(1,), batch=_ROWS)
"""A gradient whose inputs are a saved tensor and, second, the result's gradient."""


def _conv(inputs: Operands, outputs: Operands, attrs: Attributes) -> NodeTraits:
    whole = (None,) * (len(inputs) - 1)  # a filter, and perhaps a bias
    batch = Batch((0, *whole), (0,), sliced=conv_rows)
    if attrs["problem"].direction is Direction.BACKWARD_FILTER:
        batch = Batch((0, 0), (None,), accumulates=True, sliced=conv_rows)
    return NodeTraits(expensive=True, convolution=True, batch=batch)


def _matmul(inputs: Operands, outputs: Operands, attrs: Attributes) -> NodeTraits:
    """With a transposed first operand it sums over rows, like a weight gradient."""
    batch = Batch((0, None), (0,))
    if attrs["transpose_a"]:
        batch = Batch((0, 1 if attrs["transpose_b"] else 0), (None,))
    return NodeTraits(expensive=True, batch=batch)


def _concat(inputs: Operands, outputs: Operands, attrs: Attributes) -> NodeTraits:
    batch = Batch((0,) * len(inputs), (0,)) if attrs["axis"] else None
    return NodeTraits(joint=True, narrow=True, batch=batch)


def _reshape(inputs: Operands, outputs: Operands, attrs: Attributes) -> NodeTraits:
    kept = inputs[0].shape[:1] == outputs[0].shape[:1]
    return NodeTraits(view=True, narrow=True, batch=_ROW if kept else None)


def _boxed(inputs: Operands, outputs: Operands, attrs: Attributes) -> NodeTraits:
    """Cover `slice` and `pad`, over all samples or some."""
    kept = inputs[0].shape[:1] == outputs[0].shape[:1]
    rule = box_rows if "stops" in attrs else None
    batch = Batch((0,), (0,), sliced=rule) if kept else None
    return NodeTraits(narrow=True, batch=batch)


OPERATIONS: Mapping[str, NodeTraits | Rule] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("accumulate", "adagrad", "adam", "adjust_loss_scale", "fill"),
                *("find_overflow", "momentum", "rmsprop", "sgd"),
            ),
            PLAIN,
        ),
        **dict.fromkeys(
            (
                *("avg_pool", "avg_pool_grad", "identity", "lrn", "to_channels_first"),
                *("to_channels_last", "upsample_bilinear", "upsample_bilinear_grad"),
                *("upsample_nearest", "upsample_nearest_grad"),
            ),
            _FROM_ONE,
        ),
        **dict.fromkeys(
            ("gelu", "leaky_relu", "relu", "scale", "sigmoid", "tanh"), _FUNCTION
        ),
        **dict.fromkeys(
            ("gelu_grad", "leaky_relu_grad", "relu_grad", "sigmoid_grad", "tanh_grad"),
            _OF_FUNCTION,
        ),
        "accuracy": NodeTraits(
            reads_narrow=True, batch=Batch((0, 0), (None,), accumulates=True)
        ),
        "add": NodeTraits(overwrites=(0, 1), joint=True, narrow=True, batch=_ROWS),
        "add_relu": NodeTraits(overwrites=(0, 1), joint=True, narrow=True, batch=_ROWS),
        **PIECES,
        **FUSED_NORMS,
        "batch_norm": NodeTraits(
            again=Again(
                "batch_norm_apply", (0, 1, 2, 6, 7), PIECES["batch_norm_apply"]
            ),
            narrow=True,
            rereads=(0,),
            pieces=batch_norm_pieces,
        ),
        "batch_norm_eval": NodeTraits(
            narrow=True, batch=Batch((0, *(None,) * 4), (0,))
        ),
        "batch_norm_grad": NodeTraits(
            overwrites=(1,), rereads=(0,), pieces=batch_norm_grad_pieces
        ),
        "bias": NodeTraits(overwrites=(0,), narrow=True, batch=Batch((0, None), (0,))),
        "bias_grad": NodeTraits(batch=Batch((0,), (None,))),
        "bias_relu": NodeTraits(
            overwrites=(0,), narrow=True, batch=Batch((0, None), (0,))
        ),
        "bias_relu_grad": NodeTraits(overwrites=(1,), batch=Batch((0, 0), (0, None))),
        "cast": NodeTraits(batch=_ROW),
        "concat": _concat,
        "conv": _conv,
        "dropout": NodeTraits(
            overwrites=(0,),
            random=True,
            narrow=True,
            batch=Batch((0, None), (0,), sliced=drawn_rows),
        ),
        **GROUP_PIECES,
        "group_norm": NodeTraits(
            narrow=True,
            rereads=(0,),
            batch=Batch((0, None, None), (0, 0, 0)),
            pieces=group_norm_pieces,
        ),
        "group_norm_grad": NodeTraits(
            overwrites=(1,),
            rereads=(0,),
            batch=Batch((0, 0, None, 0, 0), (0, None, None)),
            pieces=group_norm_grad_pieces,
        ),
        "lrn_grad": NodeTraits(overwrites=(2,), batch=Batch((0, 0, 0), (0,))),
        "matmul": _matmul,
        "max_pool": NodeTraits(narrow=True, batch=Batch((0,), (0, 0))),
        "max_pool_grad": _FROM_TWO,
        "mean_squared_error": NodeTraits(
            batch=Batch((0, 0), (None,), (0,), sliced=_OF_FIRST)
        ),
        "mean_squared_error_grad": NodeTraits(
            batch=Batch((0, 0, None), (0,), (0,), sliced=_OF_FIRST)
        ),
        "multiply": NodeTraits(overwrites=(0, 1), narrow=True, batch=_ROWS),
        "pad": _boxed,
        "reshape": _reshape,
        "slice": _boxed,
        "softmax_cross_entropy": NodeTraits(
            reads_narrow=True, batch=Batch((0, 0), (None, 0), (0,), sliced=_OF_LABELS)
        ),
        "softmax_cross_entropy_grad": NodeTraits(
            overwrites=(0,), batch=Batch((0, 0, None), (0,), (0,), sliced=_OF_LABELS)
        ),
    }
)
"""Operation -> its traits, or a function that returns them."""

FUSIONS: Mapping[tuple[str, ...], str] = MappingProxyType(
    {
        ("add", "relu"): "add_relu",
        ("batch_norm", "add", "relu"): "batch_norm_add_relu",
        ("batch_norm", "relu"): "batch_norm_relu",
        ("bias", "relu"): "bias_relu",
    }
)
"""Chain of operations, each reading the first result of the one before -> the fused
operation. It has the attributes of the first and the inputs of all, in order."""


EPILOGUE = ("conv", "bias_relu")
"""A forward convolution and the epilogue it computes when it has a bias input."""

LIBRARY = "library"
"""Node attribute: the library whose kernel replaces the built-in one."""


def traits_of(
    op: str, inputs: Operands, outputs: Operands, attrs: Attributes = _NONE
) -> NodeTraits:
    """Return traits of an operation on given operands; `PLAIN` if unknown."""
    found = OPERATIONS.get(op, PLAIN)
    traits = found if isinstance(found, NodeTraits) else found(inputs, outputs, attrs)
    strips = strips_of(op, Whole("", tuple(inputs), tuple(outputs), attrs))
    if strips is not None:
        traits = replace(traits, strips=strips)
    if LIBRARY in attrs:  # none works in place, or gives the bits that ours would
        traits = replace(traits, overwrites=(), again=None)
    if traits.batch is None:
        return traits
    axes = (*traits.batch.inputs, *traits.batch.outputs)
    scalar = any(
        axis is not None and not spec.shape
        for axis, spec in zip(axes, (*inputs, *outputs), strict=True)
    )
    return replace(traits, batch=None) if scalar else traits


def make_node(
    tensors: Mapping[str, TensorSpec],
    name: str,
    op: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    attrs: Attributes = _NONE,
    phase: Phase = Phase.FORWARD,
    mutates: tuple[str, ...] = (),
) -> Node:
    """Return a node of a built-in operation on declared tensors."""
    specs = [tensors[t] for t in inputs], [tensors[t] for t in outputs]
    return Node(
        name, op, inputs, outputs, attrs, phase, mutates, traits_of(op, *specs, attrs)
    )


def with_library(tensors: Mapping[str, TensorSpec], node: Node, library: str) -> Node:
    """Return the node with a library's kernel."""
    attrs = MappingProxyType({**node.attrs, LIBRARY: library})
    specs = [tensors[t] for t in node.inputs], [tensors[t] for t in node.outputs]
    return replace(node, attrs=attrs, traits=traits_of(node.op, *specs, attrs))
