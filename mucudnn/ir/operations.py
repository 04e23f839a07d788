"""One table of operations: traits, fusions, and decompositions of normalisations."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from mucudnn.ir.conv import Direction
from mucudnn.ir.graph import Node, Phase
from mucudnn.ir.strips import HEIGHT, strips_of
from mucudnn.ir.tensor import TensorSpec
from mucudnn.ir.traits import (
    PLAIN,
    Batch,
    NodeTraits,
    Operands as Whole,
    Piece,
    Pieces,
    Recomputation,
    box_rows,
    conv_rows,
    counted,
    drawn_rows,
)

_VALUES = 3
"""Statistics per slice and channel: count, mean, sum of squares about the mean."""


def _cuttable(
    inputs: int,
    outputs: tuple[int | None, ...],
    *,
    others: int = 0,
    gathered: tuple[int, ...] = (),
    overwrites: tuple[int, ...] = (),
) -> NodeTraits:
    """Return traits for cutting along the batch and into spatial strips."""

    def along(axis: int) -> Batch:
        rows = tuple(None if place is None else axis for place in outputs)
        reads = (*(axis,) * inputs, *(None,) * others)
        return Batch(reads, rows, gathered=gathered)

    return NodeTraits(overwrites=overwrites, batch=along(0), strips=along(HEIGHT))


PIECES = MappingProxyType(
    {
        "batch_norm_sums": _cuttable(1, (None,), gathered=(0,)),
        "batch_norm_merge": NodeTraits(recomputable=False),
        "batch_norm_apply": _cuttable(1, (0,), others=4, overwrites=(0,)),
        "batch_norm_grad_sums": _cuttable(2, (None, None), others=2),
        "batch_norm_grad_apply": _cuttable(2, (0,), others=5, overwrites=(1,)),
    }
)
"""Operation -> its traits."""


def batch_norm_pieces(whole: Whole) -> Pieces:
    """Return the pieces: slice statistics, their merge, the normalization."""
    x, gamma, beta, running_mean, running_var = (spec.name for spec in whole.inputs)
    y, mean, inv_std = (spec.name for spec in whole.outputs)
    (channels,) = whole.outputs[1].shape
    stats = TensorSpec(f"{whole.name}:stats", (_VALUES, channels), "float64")
    running = running_mean, running_var
    return (stats,), (
        _batch_norm_piece("sums", "batch_norm_sums", (x,), (stats.name,)),
        replace(
            _batch_norm_piece(
                "merge", "batch_norm_merge", (stats.name, *running), (mean, inv_std)
            ),
            attrs=whole.attrs,
            mutates=running,
        ),
        _batch_norm_piece(
            "apply", "batch_norm_apply", (x, gamma, beta, mean, inv_std), (y,)
        ),
    )


def batch_norm_grad_pieces(whole: Whole) -> Pieces:
    """Return the pieces: gradients of gamma and beta, then of the input."""
    x, dy, gamma, mean, inv_std = (spec.name for spec in whole.inputs)
    dx, dgamma, dbeta = (spec.name for spec in whole.outputs)
    count = math.prod(whole.inputs[0].shape) // math.prod(whole.inputs[2].shape)
    sums = dgamma, dbeta
    apply = "batch_norm_grad_apply"
    return (), (
        _batch_norm_piece("sums", "batch_norm_grad_sums", (x, dy, mean, inv_std), sums),
        replace(
            _batch_norm_piece(
                "apply", apply, (x, dy, gamma, mean, inv_std, *sums), (dx,)
            ),
            attrs=MappingProxyType({"count": count}),
        ),
    )


def _batch_norm_piece(
    name: str, op: str, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> Piece:
    return Piece(name, op, inputs, outputs, MappingProxyType({}), PIECES[op])


# Batch normalization fused with a sum and a ReLU, and its pieces.
#
# A fused node is cut along the batch like the nodes it replaces: the pieces of the
# normalization, then the sum and the ReLU. The gradient of the variant without a sum
# reads no result: it recomputes the ReLU's mask from the input with the formula of the
# forward pass, bit for bit.


_STRIPS_OF_ONE = Batch((HEIGHT,), (HEIGHT,))

_STRIPS_OF_TWO = Batch((HEIGHT, HEIGHT), (HEIGHT,))

_RELU = NodeTraits(
    overwrites=(0,), narrow=True, batch=Batch((0,), (0,)), strips=_STRIPS_OF_ONE
)

_ADD = NodeTraits(
    overwrites=(0, 1),
    joins_branches=True,
    batch=Batch((0, 0), (0,)),
    strips=_STRIPS_OF_TWO,
)

_RELU_GRAD = NodeTraits(
    overwrites=(1,), batch=Batch((0, 0), (0,)), strips=_STRIPS_OF_TWO
)


def _forward(whole: Whole) -> Pieces:
    """Return the normalization's pieces, a sum for each term, and a ReLU."""
    y, mean, inv_std = whole.outputs
    own, terms = whole.inputs[:5], whole.inputs[5:]
    normed = _like(y, f"{whole.name}:normed")
    norm = replace(whole, inputs=own, outputs=(normed, mean, inv_std))
    between, pieces = batch_norm_pieces(norm)
    between = (*between, normed)
    for term in terms:
        total = _like(y, f"{whole.name}:sum")
        added = _fused_norm_piece(
            "add", "add", (normed.name, term.name), (total.name,), _ADD
        )
        between, pieces, normed = (*between, total), (*pieces, added), total
    relu = _fused_norm_piece("relu", "relu", (normed.name,), (y.name,), _RELU)
    return between, (*pieces, relu)


def _backward(whole: Whole) -> Pieces:
    """Return pieces: recomputed ReLU result, its gradient, the normalization's."""
    x, dy, gamma, beta, mean, inv_std = whole.inputs
    normed, y, masked = (
        _like(dy, f"{whole.name}:{what}") for what in ("normed", "y", "masked")
    )
    again = tuple(spec.name for spec in (x, gamma, beta, mean, inv_std))
    apply = "batch_norm_apply"
    norm = replace(whole, inputs=(x, masked, gamma, mean, inv_std))
    between, pieces = batch_norm_grad_pieces(norm)
    return (normed, y, masked, *between), (
        _fused_norm_piece("again", apply, again, (normed.name,), PIECES[apply]),
        _fused_norm_piece("relu", "relu", (normed.name,), (y.name,), _RELU),
        _masking(y, dy, masked),
        *pieces,
    )


def _backward_of_sum(whole: Whole) -> Pieces:
    """Return pieces: the ReLU's gradient (also the term's), the normalization's."""
    x, dy, y, gamma, mean, inv_std = whole.inputs
    masked, *others = whole.outputs
    norm = replace(
        whole, inputs=(x, masked, gamma, mean, inv_std), outputs=tuple(others)
    )
    between, pieces = batch_norm_grad_pieces(norm)
    return between, (_masking(y, dy, masked), *pieces)


def _masking(y: TensorSpec, dy: TensorSpec, masked: TensorSpec) -> Piece:
    inputs = y.name, dy.name
    return _fused_norm_piece("mask", "relu_grad", inputs, (masked.name,), _RELU_GRAD)


def _like(spec: TensorSpec, name: str) -> TensorSpec:
    return replace(spec, name=name, alias=None, offset=0)


def _fused_norm_piece(
    name: str,
    op: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    traits: NodeTraits,
) -> Piece:
    return Piece(name, op, inputs, outputs, MappingProxyType({}), traits)


_FORWARD = NodeTraits(
    replay=(("update", False),), narrow=True, reads_twice=(0,), decomposition=_forward
)


FUSED_NORMS = MappingProxyType(
    {
        "batch_norm_relu": _FORWARD,
        "batch_norm_relu_grad": NodeTraits(
            overwrites=(1,), reads_twice=(0, 1), decomposition=_backward
        ),
        "batch_norm_add_relu": replace(_FORWARD, joins_branches=True),
        "batch_norm_add_relu_grad": NodeTraits(
            overwrites=(1,), reads_twice=(0,), decomposition=_backward_of_sum
        ),
    }
)
"""Operation -> its traits."""


Attributes = Mapping[str, Any]


# Group and layer normalization split into pieces that run on strips of images.
#
# Samples are independent, but all rows of a sample depend on each other. Each strip
# computes count, mean and sum of squares about the mean of every group; they are merged
# like the slices of a batch normalization. In the backward pass, a strip needs two sums
# per group over all strips: of the weighted gradient, and of its products with the
# deviations.


_SUMS = 2
"""Sums per strip and group: weighted gradients, their products with deviations."""


Specs = Sequence[TensorSpec]


def _gamma_axis(attrs: Attributes) -> int | None:
    """Return the axis of image rows in gamma, which has no batch axis, or None."""
    return HEIGHT - 1 if attrs["per_element"] else None


def _apply(inputs: Specs, outputs: Specs, attrs: Attributes) -> NodeTraits:
    gamma = _gamma_axis(attrs)
    strips = Batch((HEIGHT, gamma, gamma, None, None), (HEIGHT,))
    return NodeTraits(overwrites=(0,), strips=strips)


def _grad_sums(inputs: Specs, outputs: Specs, attrs: Attributes) -> NodeTraits:
    gamma = _gamma_axis(attrs)
    reads = HEIGHT, HEIGHT, gamma, None, None
    return NodeTraits(strips=Batch(reads, (gamma, gamma, None)))


def _grad_apply(inputs: Specs, outputs: Specs, attrs: Attributes) -> NodeTraits:
    reads = HEIGHT, HEIGHT, _gamma_axis(attrs), None, None, None
    return NodeTraits(overwrites=(1,), strips=Batch(reads, (HEIGHT,)))


_MOMENTS = NodeTraits(strips=Batch((HEIGHT,), (None,), gathered=(0,)))

_MERGE = NodeTraits(recomputable=False)


GROUP_PIECES: Mapping[
    str, NodeTraits | Callable[[Specs, Specs, Attributes], NodeTraits]
] = MappingProxyType(
    {
        "group_norm_sums": _MOMENTS,
        "group_norm_merge": _MERGE,
        "group_norm_apply": _apply,
        "group_norm_grad_sums": _grad_sums,
        "group_norm_grad_apply": _grad_apply,
    }
)
"""Operation -> its traits, or a function that returns them."""


def group_norm_pieces(whole: Whole) -> Pieces:
    """Return the pieces: strip statistics, their merge, the normalization."""
    x, gamma, beta = (spec.name for spec in whole.inputs)
    y, mean, inv_std = (spec.name for spec in whole.outputs)
    groups = whole.outputs[1].shape
    stats = TensorSpec(f"{whole.name}:stats", (_VALUES, *groups), "float64")
    piece = partial(_piece, whole, whole.attrs)
    return (stats,), (
        piece("sums", "group_norm_sums", (x,), (stats.name,)),
        piece("merge", "group_norm_merge", (stats.name,), (mean, inv_std)),
        piece("apply", "group_norm_apply", (x, gamma, beta, mean, inv_std), (y,)),
    )


def group_norm_grad_pieces(whole: Whole) -> Pieces:
    """Return the pieces: gradients of gamma and beta, then of the input."""
    x, dy, gamma, mean, inv_std = (spec.name for spec in whole.inputs)
    dx, dgamma, dbeta = (spec.name for spec in whole.outputs)
    groups, dtype = whole.inputs[3].shape, whole.inputs[3].dtype
    totals = TensorSpec(f"{whole.name}:totals", (_SUMS, *groups), dtype)
    count = math.prod(whole.inputs[0].shape[1:]) // whole.attrs["groups"]
    piece = partial(_piece, whole, {**whole.attrs, "count": count})
    reads, sums = (x, dy, gamma, mean, inv_std), (dgamma, dbeta, totals.name)
    apply = "group_norm_grad_apply"
    return (totals,), (
        piece("sums", "group_norm_grad_sums", reads, sums),
        piece("apply", apply, (*reads, totals.name), (dx,)),
    )


def _piece(
    whole: Whole,
    attrs: Attributes,
    name: str,
    op: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
) -> Piece:
    traits = GROUP_PIECES[op]
    if not isinstance(traits, NodeTraits):
        traits = traits(whole.inputs, whole.outputs, attrs)
    return Piece(name, op, inputs, outputs, MappingProxyType(dict(attrs)), traits)


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
    return NodeTraits(joins_branches=True, narrow=True, batch=batch)


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
        "add": NodeTraits(
            overwrites=(0, 1), joins_branches=True, narrow=True, batch=_ROWS
        ),
        "add_relu": NodeTraits(
            overwrites=(0, 1), joins_branches=True, narrow=True, batch=_ROWS
        ),
        **PIECES,
        **FUSED_NORMS,
        "batch_norm": NodeTraits(
            recompute_as=Recomputation(
                "batch_norm_apply", (0, 1, 2, 6, 7), PIECES["batch_norm_apply"]
            ),
            narrow=True,
            reads_twice=(0,),
            decomposition=batch_norm_pieces,
        ),
        "batch_norm_eval": NodeTraits(
            narrow=True, batch=Batch((0, *(None,) * 4), (0,))
        ),
        "batch_norm_grad": NodeTraits(
            overwrites=(1,), reads_twice=(0,), decomposition=batch_norm_grad_pieces
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
            reads_twice=(0,),
            batch=Batch((0, None, None), (0, 0, 0)),
            decomposition=group_norm_pieces,
        ),
        "group_norm_grad": NodeTraits(
            overwrites=(1,),
            reads_twice=(0,),
            batch=Batch((0, 0, None, 0, 0), (0, None, None)),
            decomposition=group_norm_grad_pieces,
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
        traits = replace(traits, overwrites=(), recompute_as=None)
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
