"""One record for each built-in operation, in one table, and how nodes get their traits.

An operation is added by a layer in `layers`, a record in `OPERATIONS`, a gradient in
`passes/graph/autodiff.py` and a kernel in each backend.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from mucudnn.ir.conv import Direction
from mucudnn.ir.graph import Node, Phase
from mucudnn.ir.strips import (
    BOX,
    HEIGHT,
    IMAGE,
    IMAGE_AND_WEIGHTS,
    LABELS,
    PAD,
    POOL,
    POOL_GRAD,
    TWO_IMAGES,
    StripRule,
    cut_concat,
    cut_conv,
    drawn_strip,
    strips_of,
    upsample_strips,
)
from mucudnn.ir.tensor import TensorSpec
from mucudnn.ir.traits import (
    PLAIN,
    Batch,
    NodeTraits,
    Operands as Whole,
    Pieces,
    Recomputation,
    box_rows,
    conv_rows,
    counted,
    drawn_rows,
)

Attributes = Mapping[str, Any]
Operands = Sequence[TensorSpec]
Shape = tuple[int, ...]

TraitsRule = Callable[[Operands, Operands, Attributes], NodeTraits]
"""Function from inputs, results and attributes to traits."""

_NONE: Attributes = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ChannelsLast:
    """A mapping of an operation's channels-last form to an existing kernel.

    Attributes:
        attrs: (channels-first attributes, image rank) -> attributes of the node.
        kernel_attrs: Attributes of the node -> attributes passed to the kernel.
        kernel_shape: Shape of an image -> shape passed to the kernel.
        axes: Maximum rank of the images.
        is_supported: Attributes of the node -> whether a kernel exists.
    """

    attrs: Callable[[Attributes, int], Attributes] = lambda attrs, rank: attrs
    kernel_attrs: Callable[[Attributes], Attributes] = lambda attrs: attrs
    kernel_shape: Callable[[Shape], Shape] = lambda shape: shape
    axes: int = 5
    is_supported: Callable[[Attributes], bool] = lambda attrs: True


@dataclass(frozen=True, slots=True)
class Operation:
    """A built-in operation: traits, strips and layouts, without gradient and kernels.

    Attributes:
        traits: Its traits, or a function of its operands and attributes.
        strips: How images are cut into strips, or a function of its operands. None if
            they cannot be cut, or if `traits` has strips for tensors of any shape.
        channels_last: How it runs on channels-last images; None if it cannot.
    """

    traits: NodeTraits | TraitsRule = PLAIN
    strips: Batch | StripRule | None = None
    channels_last: ChannelsLast | None = None


# Normalizations, split into pieces that can be cut: statistics of each slice or strip,
# their merge, and the normalization itself.


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


def _piece(
    name: str,
    op: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    attrs: Attributes = _NONE,
    *,
    traits: NodeTraits | None = None,
    mutates: tuple[str, ...] = (),
) -> Node:
    """Return a piece, by default with the traits of its operation."""
    if traits is None:
        known = OPERATIONS[op].traits
        traits = known if isinstance(known, NodeTraits) else known((), (), attrs)
    return Node(name, op, inputs, outputs, attrs, mutates=mutates, traits=traits)


def batch_norm_pieces(whole: Whole) -> Pieces:
    """Return the pieces: slice statistics, their merge, the normalization."""
    x, gamma, beta, running_mean, running_var = (spec.name for spec in whole.inputs)
    y, mean, inv_std = (spec.name for spec in whole.outputs)
    (channels,) = whole.outputs[1].shape
    stats = TensorSpec(f"{whole.name}:stats", (_VALUES, channels), "float64")
    running = running_mean, running_var
    return (stats,), (
        _piece("sums", "batch_norm_sums", (x,), (stats.name,)),
        _piece(
            "merge",
            "batch_norm_merge",
            (stats.name, *running),
            (mean, inv_std),
            whole.attrs,
            mutates=running,
        ),
        _piece("apply", "batch_norm_apply", (x, gamma, beta, mean, inv_std), (y,)),
    )


def batch_norm_grad_pieces(whole: Whole) -> Pieces:
    """Return the pieces: gradients of gamma and beta, then of the input."""
    x, dy, gamma, mean, inv_std = (spec.name for spec in whole.inputs)
    dx, dgamma, dbeta = (spec.name for spec in whole.outputs)
    count = math.prod(whole.inputs[0].shape) // math.prod(whole.inputs[2].shape)
    sums = dgamma, dbeta
    return (), (
        _piece("sums", "batch_norm_grad_sums", (x, dy, mean, inv_std), sums),
        _piece(
            "apply",
            "batch_norm_grad_apply",
            (x, dy, gamma, mean, inv_std, *sums),
            (dx,),
            MappingProxyType({"count": count}),
        ),
    )


# Batch normalization fused with a sum and a ReLU, and its pieces.
#
# A fused node is cut along the batch like the nodes it replaces: the pieces of the
# normalization, then the sum and the ReLU. The gradient of the variant without a sum
# reads no result: it recomputes the ReLU's mask from the input with the formula of the
# forward pass, bit for bit.


_RELU = NodeTraits(overwrites=(0,), narrow=True, batch=Batch((0,), (0,)), strips=IMAGE)

_ADD = NodeTraits(
    overwrites=(0, 1),
    joins_branches=True,
    batch=Batch((0, 0), (0,)),
    strips=TWO_IMAGES,
)

_RELU_GRAD = NodeTraits(overwrites=(1,), batch=Batch((0, 0), (0,)), strips=TWO_IMAGES)


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
        added = _piece(
            "add", "add", (normed.name, term.name), (total.name,), traits=_ADD
        )
        between, pieces, normed = (*between, total), (*pieces, added), total
    relu = _piece("relu", "relu", (normed.name,), (y.name,), traits=_RELU)
    return between, (*pieces, relu)


def _backward(whole: Whole) -> Pieces:
    """Return pieces: recomputed ReLU result, its gradient, the normalization's."""
    x, dy, gamma, beta, mean, inv_std = whole.inputs
    normed, y, masked = (
        _like(dy, f"{whole.name}:{what}") for what in ("normed", "y", "masked")
    )
    again = tuple(spec.name for spec in (x, gamma, beta, mean, inv_std))
    norm = replace(whole, inputs=(x, masked, gamma, mean, inv_std))
    between, pieces = batch_norm_grad_pieces(norm)
    return (normed, y, masked, *between), (
        _piece("again", "batch_norm_apply", again, (normed.name,)),
        _piece("relu", "relu", (normed.name,), (y.name,), traits=_RELU),
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


def _masking(y: TensorSpec, dy: TensorSpec, masked: TensorSpec) -> Node:
    inputs = y.name, dy.name
    return _piece("mask", "relu_grad", inputs, (masked.name,), traits=_RELU_GRAD)


def _like(spec: TensorSpec, name: str) -> TensorSpec:
    return replace(spec, name=name, alias=None, offset=0)


_FORWARD = NodeTraits(
    replay=(("update", False),), narrow=True, reads_twice=(0,), decomposition=_forward
)


# Group and layer normalization split into pieces that run on strips of images.
#
# Samples are independent, but all rows of a sample depend on each other. Each strip
# computes count, mean and sum of squares about the mean of every group; they are merged
# like the slices of a batch normalization. In the backward pass, a strip needs two sums
# per group over all strips: of the weighted gradient, and of its products with the
# deviations.


_SUMS = 2
"""Sums per strip and group: weighted gradients, their products with deviations."""


def _piece_of_group_norm(
    reads: str, writes: str, overwrites: tuple[int, ...] = ()
) -> TraitsRule:
    """Return the traits of a piece from a letter for each operand.

    `x` has image rows; `g`, like gamma, has them where it has a value per element, at
    another axis as it has no batch; `-` has none.
    """

    def rule(inputs: Operands, outputs: Operands, attrs: Attributes) -> NodeTraits:
        axis = {"x": HEIGHT, "g": HEIGHT - 1 if attrs["per_element"] else None}
        strips = Batch(tuple(map(axis.get, reads)), tuple(map(axis.get, writes)))
        return NodeTraits(overwrites=overwrites, strips=strips)

    return rule


def group_norm_pieces(whole: Whole) -> Pieces:
    """Return the pieces: strip statistics, their merge, the normalization."""
    x, gamma, beta = (spec.name for spec in whole.inputs)
    y, mean, inv_std = (spec.name for spec in whole.outputs)
    attrs, groups = whole.attrs, whole.outputs[1].shape
    stats = TensorSpec(f"{whole.name}:stats", (_VALUES, *groups), "float64")
    return (stats,), (
        _piece("sums", "group_norm_sums", (x,), (stats.name,), attrs),
        _piece("merge", "group_norm_merge", (stats.name,), (mean, inv_std), attrs),
        _piece(
            "apply", "group_norm_apply", (x, gamma, beta, mean, inv_std), (y,), attrs
        ),
    )


def group_norm_grad_pieces(whole: Whole) -> Pieces:
    """Return the pieces: gradients of gamma and beta, then of the input."""
    x, dy, gamma, mean, inv_std = (spec.name for spec in whole.inputs)
    dx, dgamma, dbeta = (spec.name for spec in whole.outputs)
    groups, dtype = whole.inputs[3].shape, whole.inputs[3].dtype
    totals = TensorSpec(f"{whole.name}:totals", (_SUMS, *groups), dtype)
    count = math.prod(whole.inputs[0].shape[1:]) // whole.attrs["groups"]
    attrs = MappingProxyType({**whole.attrs, "count": count})
    reads, sums = (x, dy, gamma, mean, inv_std), (dgamma, dbeta, totals.name)
    apply = "group_norm_grad_apply"
    return (totals,), (
        _piece("sums", "group_norm_grad_sums", reads, sums, attrs),
        _piece("apply", apply, (*reads, totals.name), (dx,), attrs),
    )


_OF_FIRST, _OF_LABELS = partial(counted, 0), partial(counted, 1)

_ROW = Batch((0,), (0,))

_ROWS = Batch((0, 0), (0,))

_FROM_ONE = NodeTraits(narrow=True, batch=_ROW)

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
    """Cut rows; a product with a transposed first operand is a sum over them."""
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


# Forms of operations on channels-last images.


_MOST_WINDOWED = 4
"""Maximum rank of windowed images: channels last adds one axis, and kernels support at
most three spatial axes."""


def _windows_along_channels(attrs: Attributes) -> Attributes:
    """Extend windows by one axis, the channels, with width 1."""
    # A window of width 1 along the channels leaves them independent of each other.
    extra = {"kernel": 1, "stride": 1, "padding": 0, "extra": 0}
    return {**attrs, **{k: (*attrs[k], n) for k, n in extra.items() if k in attrs}}


def channels_to_end(values: Sequence[int]) -> Shape:
    """Permute per-axis values from (N, C, *spatial) to (N, *spatial, C)."""
    n, c, *spatial = values
    return n, *spatial, c


_ANY = ChannelsLast()
_CHANNELS = ChannelsLast(kernel_shape=lambda shape: (math.prod(shape[:-1]), shape[-1]))
_POOL = ChannelsLast(
    kernel_attrs=_windows_along_channels,
    kernel_shape=lambda shape: (shape[0], 1, *shape[1:]),
    axes=_MOST_WINDOWED,
)
_RESAMPLE = replace(
    _POOL, kernel_attrs=lambda attrs: {**attrs, "scale": (*attrs["scale"], 1)}
)
_BOX = ChannelsLast(
    attrs=lambda attrs, rank: {k: channels_to_end(v) for k, v in attrs.items()}
)
_CONCAT = ChannelsLast(
    attrs=lambda attrs, rank: {
        **attrs,
        "axis": channels_to_end(range(rank)).index(attrs["axis"]),
    }
)
_CONV = ChannelsLast(
    attrs=lambda attrs, rank: {
        **attrs,
        "problem": replace(attrs["problem"], layout="NHWC"),
    }
)
_GROUPS = ChannelsLast(
    kernel_attrs=lambda attrs: {**attrs, "channels_last": True},
    kernel_shape=lambda shape: (shape[0], math.prod(shape[1:-1]), shape[-1]),
    is_supported=lambda attrs: not attrs["per_element"],
)

_UNKNOWN = Operation()

_OF_ONE_IMAGE = Operation(_FROM_ONE, IMAGE, _ANY)
_FUNCTION_OF_IMAGE = Operation(_FUNCTION, IMAGE, _ANY)
_GRADIENT_OF_FUNCTION = Operation(_OF_FUNCTION, TWO_IMAGES, _ANY)
_SUM = NodeTraits(overwrites=(0, 1), joins_branches=True, narrow=True, batch=_ROWS)
_ADD_CHANNELS = Operation(
    NodeTraits(overwrites=(0,), narrow=True, batch=Batch((0, None), (0,))),
    IMAGE_AND_WEIGHTS,
    _CHANNELS,
)
_APPLY_BATCH_NORM = _cuttable(1, (0,), others=4, overwrites=(0,))
_MERGE = NodeTraits(recomputable=False)

OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        # Updates of parameters and of what belongs to them.
        **dict.fromkeys(
            (
                *("accumulate", "adagrad", "adam", "adjust_loss_scale", "fill"),
                *("find_overflow", "momentum", "rmsprop", "sgd"),
            ),
            Operation(PLAIN),
        ),
        # Functions of each element, and their gradients.
        **dict.fromkeys(
            ("gelu", "leaky_relu", "relu", "scale", "sigmoid", "tanh"),
            _FUNCTION_OF_IMAGE,
        ),
        **dict.fromkeys(
            ("gelu_grad", "leaky_relu_grad", "relu_grad", "sigmoid_grad", "tanh_grad"),
            _GRADIENT_OF_FUNCTION,
        ),
        "add": Operation(_SUM, TWO_IMAGES, _ANY),
        "add_relu": Operation(_SUM, TWO_IMAGES, _ANY),
        "bias": _ADD_CHANNELS,
        "bias_grad": Operation(
            NodeTraits(batch=Batch((0,), (None,))),
            Batch((HEIGHT,), (None,)),
            _CHANNELS,
        ),
        "bias_relu": _ADD_CHANNELS,
        "bias_relu_grad": Operation(
            NodeTraits(overwrites=(1,), batch=Batch((0, 0), (0, None))),
            Batch((HEIGHT, HEIGHT), (HEIGHT, None)),
            _CHANNELS,
        ),
        "cast": Operation(NodeTraits(batch=_ROW), IMAGE, _ANY),
        "dropout": Operation(
            NodeTraits(
                overwrites=(0,),
                random=True,
                narrow=True,
                batch=Batch((0, None), (0,), sliced=drawn_rows),
            ),
            replace(IMAGE_AND_WEIGHTS, sliced=drawn_strip),
        ),
        "identity": _OF_ONE_IMAGE,
        "multiply": Operation(
            NodeTraits(overwrites=(0, 1), narrow=True, batch=_ROWS), TWO_IMAGES, _ANY
        ),
        # Products.
        "conv": Operation(_conv, cut_conv, _CONV),
        "matmul": Operation(_matmul),
        # Normalizations, whole and in pieces.
        "batch_norm": Operation(
            NodeTraits(
                recompute_as=Recomputation(
                    "batch_norm_apply", (0, 1, 2, 6, 7), _APPLY_BATCH_NORM
                ),
                narrow=True,
                reads_twice=(0,),
                decomposition=batch_norm_pieces,
            ),
            channels_last=_CHANNELS,
        ),
        "batch_norm_eval": Operation(
            NodeTraits(narrow=True, batch=Batch((0, *(None,) * 4), (0,))),
            Batch((HEIGHT, *(None,) * 4), (HEIGHT,)),
            _CHANNELS,
        ),
        "batch_norm_grad": Operation(
            NodeTraits(
                overwrites=(1,), reads_twice=(0,), decomposition=batch_norm_grad_pieces
            ),
            channels_last=_CHANNELS,
        ),
        "batch_norm_sums": Operation(
            _cuttable(1, (None,), gathered=(0,)), channels_last=_CHANNELS
        ),
        "batch_norm_merge": Operation(_MERGE),
        "batch_norm_apply": Operation(_APPLY_BATCH_NORM, channels_last=_CHANNELS),
        "batch_norm_grad_sums": Operation(
            _cuttable(2, (None, None), others=2), channels_last=_CHANNELS
        ),
        "batch_norm_grad_apply": Operation(
            _cuttable(2, (0,), others=5, overwrites=(1,)), channels_last=_CHANNELS
        ),
        "batch_norm_relu": Operation(_FORWARD, channels_last=_CHANNELS),
        "batch_norm_relu_grad": Operation(
            NodeTraits(overwrites=(1,), reads_twice=(0, 1), decomposition=_backward),
            channels_last=_CHANNELS,
        ),
        "batch_norm_add_relu": Operation(
            replace(_FORWARD, joins_branches=True), channels_last=_CHANNELS
        ),
        "batch_norm_add_relu_grad": Operation(
            NodeTraits(
                overwrites=(1,), reads_twice=(0,), decomposition=_backward_of_sum
            ),
            channels_last=_CHANNELS,
        ),
        "group_norm": Operation(
            NodeTraits(
                narrow=True,
                reads_twice=(0,),
                batch=Batch((0, None, None), (0, 0, 0)),
                decomposition=group_norm_pieces,
            ),
            channels_last=_GROUPS,
        ),
        "group_norm_grad": Operation(
            NodeTraits(
                overwrites=(1,),
                reads_twice=(0,),
                batch=Batch((0, 0, None, 0, 0), (0, None, None)),
                decomposition=group_norm_grad_pieces,
            ),
            channels_last=_GROUPS,
        ),
        "group_norm_sums": Operation(
            NodeTraits(strips=Batch((HEIGHT,), (None,), gathered=(0,)))
        ),
        "group_norm_merge": Operation(_MERGE),
        "group_norm_apply": Operation(_piece_of_group_norm("xgg--", "x", (0,))),
        "group_norm_grad_sums": Operation(_piece_of_group_norm("xxg--", "gg-")),
        "group_norm_grad_apply": Operation(_piece_of_group_norm("xxg---", "x", (1,))),
        "lrn": Operation(_FROM_ONE, IMAGE, _CHANNELS),
        "lrn_grad": Operation(
            NodeTraits(overwrites=(2,), batch=Batch((0, 0, 0), (0,))),
            Batch((HEIGHT,) * 3, (HEIGHT,)),
            _CHANNELS,
        ),
        # Pooling and upsampling.
        "avg_pool": Operation(_FROM_ONE, POOL, _POOL),
        "avg_pool_grad": Operation(_FROM_ONE, POOL_GRAD, _POOL),
        "max_pool": Operation(
            NodeTraits(narrow=True, batch=Batch((0,), (0, 0))),
            replace(POOL, outputs=(HEIGHT, HEIGHT)),
            _POOL,
        ),
        "max_pool_grad": Operation(
            NodeTraits(batch=_ROWS), replace(POOL_GRAD, inputs=(HEIGHT, HEIGHT)), _POOL
        ),
        "upsample_bilinear": Operation(_FROM_ONE, upsample_strips(border=1), _RESAMPLE),
        "upsample_bilinear_grad": Operation(
            _FROM_ONE, upsample_strips(border=1, grad=True), _RESAMPLE
        ),
        "upsample_nearest": Operation(_FROM_ONE, upsample_strips(border=0), _RESAMPLE),
        "upsample_nearest_grad": Operation(
            _FROM_ONE, upsample_strips(border=0, grad=True), _RESAMPLE
        ),
        # Shapes and layouts. A strided slice has no `stops`, and no strips.
        "concat": Operation(_concat, cut_concat, _CONCAT),
        "pad": Operation(_boxed, PAD, _BOX),
        "reshape": Operation(_reshape),
        "slice": Operation(
            _boxed, lambda whole: BOX if "stops" in whole.attrs else None, _BOX
        ),
        "to_channels_first": Operation(_FROM_ONE),
        "to_channels_last": Operation(_FROM_ONE),
        # Losses and metrics, for labels of samples or of pixels.
        "accuracy": Operation(
            NodeTraits(
                reads_narrow=True, batch=Batch((0, 0), (None,), accumulates=True)
            ),
            Batch((HEIGHT, LABELS), (None,), accumulates=True),
        ),
        "mean_squared_error": Operation(
            NodeTraits(batch=Batch((0, 0), (None,), (0,), sliced=_OF_FIRST)),
            Batch((HEIGHT, HEIGHT), (None,), (0,), sliced=_OF_FIRST),
        ),
        "mean_squared_error_grad": Operation(
            NodeTraits(batch=Batch((0, 0, None), (0,), (0,), sliced=_OF_FIRST)),
            Batch((HEIGHT, HEIGHT, None), (HEIGHT,), (0,), sliced=_OF_FIRST),
        ),
        "softmax_cross_entropy": Operation(
            NodeTraits(
                reads_narrow=True,
                batch=Batch((0, 0), (None, 0), (0,), sliced=_OF_LABELS),
            ),
            Batch((HEIGHT, LABELS), (None, HEIGHT), (0,), sliced=_OF_LABELS),
        ),
        "softmax_cross_entropy_grad": Operation(
            NodeTraits(
                overwrites=(0,),
                batch=Batch((0, 0, None), (0,), (0,), sliced=_OF_LABELS),
            ),
            Batch((HEIGHT, LABELS, None), (HEIGHT,), (0,), sliced=_OF_LABELS),
        ),
    }
)
"""Built-in operations by name."""

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
    known = OPERATIONS.get(op, _UNKNOWN)
    traits = known.traits
    if not isinstance(traits, NodeTraits):
        traits = traits(inputs, outputs, attrs)
    whole = Whole("", tuple(inputs), tuple(outputs), attrs)
    strips = None if known.strips is None else strips_of(known.strips, whole)
    if strips is not None:
        traits = replace(traits, strips=strips)
    if LIBRARY in attrs:  # none works in place, or gives the bits that ours would
        traits = replace(traits, overwrites=(), recompute_as=None)
    if traits.batch is None:
        return traits
    axes = (*traits.batch.inputs, *traits.batch.outputs)
    # A scalar has no rows, whatever its operation says of others.
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
