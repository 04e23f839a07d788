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
    IMAGE_AND_WEIGHTS,
    LABELS,
    PAD,
    POOL,
    POOL_GRAD,
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
# their merge, and the normalization itself. A backward pass needs sums over all slices.
#
# A node that is fused with a sum and a ReLU is cut like the nodes that it replaces. The
# gradient of the variant without a sum reads no result: it recomputes the ReLU's mask
# from the input with the formula of the forward pass, bit for bit.
#
# Samples of a group normalization are independent, but all rows of a sample depend on
# each other: strips of images are merged like the slices of a batch normalization.


_VALUES = 3
"""Statistics per slice and channel: count, mean, sum of squares about the mean."""

_SUMS = 2
"""Sums per strip and group: weighted gradients, their products with deviations."""

Known = Mapping[str, TensorSpec]
"""Operands of a node, and tensors between its pieces, by their names in a rule."""

_BETWEEN: Mapping[str, Callable[[Known], TensorSpec]] = {
    "stats": lambda of: TensorSpec("", (_VALUES, *of["mean"].shape), "float64"),
    "totals": lambda of: TensorSpec("", (_SUMS, *of["mean"].shape), of["mean"].dtype),
}
"""Tensors between pieces that are unlike the result, or the gradient of the result."""


def _in_pieces(operands: str, *pieces: str) -> Callable[[Whole], Pieces]:
    """Return a rule that splits a node into pieces.

    Args:
        operands: Names of its inputs and results, such as `x gamma -> y`.
        pieces: Name, operation, inputs and results of each piece, such as
            `sums batch_norm_sums x -> stats`. Results that are not the node's are
            tensors between pieces. A piece whose operation is followed by `*` has the
            attributes of the node, and by `#` the number of values in a mean.
    """

    def rule(whole: Whole) -> Pieces:
        names = operands.replace("->", "").split()
        of = dict(zip(names, (*whole.inputs, *whole.outputs), strict=True))
        like = of.get("dy") or of["y"]
        between, nodes = list[TensorSpec](), list[Node]()
        for piece in pieces:
            head, _, made = piece.partition(" -> ")
            name, marked, *reads = head.split()
            for result in made.split():
                if result not in of:
                    spec = _BETWEEN[result](of) if result in _BETWEEN else like
                    own = f"{whole.name}:{result}"
                    of[result] = replace(spec, name=own, alias=None, offset=0)
                    between.append(of[result])
            attrs = whole.attrs if "*" in marked else _NONE
            if "#" in marked:
                count = math.prod(of["x"].shape) // math.prod(of["mean"].shape)
                attrs = MappingProxyType({**attrs, "count": count})
            op = marked.rstrip("*#")
            known = OPERATIONS[op]
            traits = known.traits
            if not isinstance(traits, NodeTraits):
                traits = traits((), (), attrs)
            if isinstance(known.strips, Batch):  # pieces of images are images
                traits = replace(traits, strips=known.strips)
            inputs = tuple(of[read].name for read in reads)
            outputs = tuple(of[result].name for result in made.split())
            changed = tuple(of[t].name for t in reads if t.startswith("running"))
            node = Node(name, op, inputs, outputs, attrs, mutates=changed)
            nodes.append(replace(node, traits=traits))
        return tuple(between), tuple(nodes)

    return rule


_BATCH_NORM = "x gamma beta running_mean running_var"
_STATISTICS = (
    "sums batch_norm_sums x -> stats",
    "merge batch_norm_merge* stats running_mean running_var -> mean inv_std",
)
_NORMED = "apply batch_norm_apply x gamma beta mean inv_std -> normed"
_MASK = "mask relu_grad y dy -> masked"
_MASKED_GRADIENTS = (
    "sums batch_norm_grad_sums x masked mean inv_std -> dgamma dbeta",
    "apply batch_norm_grad_apply# x masked gamma mean inv_std dgamma dbeta -> dx",
)

_batch_norm = _in_pieces(
    f"{_BATCH_NORM} -> y mean inv_std",
    *_STATISTICS,
    "apply batch_norm_apply x gamma beta mean inv_std -> y",
)
_batch_norm_relu = _in_pieces(
    f"{_BATCH_NORM} -> y mean inv_std", *_STATISTICS, _NORMED, "relu relu normed -> y"
)
_batch_norm_add_relu = _in_pieces(
    f"{_BATCH_NORM} term -> y mean inv_std",
    *(*_STATISTICS, _NORMED),
    "add add normed term -> sum",
    "relu relu sum -> y",
)
_batch_norm_grad = _in_pieces(
    "x dy gamma mean inv_std -> dx dgamma dbeta",
    "sums batch_norm_grad_sums x dy mean inv_std -> dgamma dbeta",
    "apply batch_norm_grad_apply# x dy gamma mean inv_std dgamma dbeta -> dx",
)
_batch_norm_relu_grad = _in_pieces(
    "x dy gamma beta mean inv_std -> dx dgamma dbeta",
    "again batch_norm_apply x gamma beta mean inv_std -> normed",
    "relu relu normed -> y",
    *(_MASK, *_MASKED_GRADIENTS),
)
_batch_norm_add_relu_grad = _in_pieces(
    "x dy y gamma mean inv_std -> masked dx dgamma dbeta", _MASK, *_MASKED_GRADIENTS
)
_group_norm = _in_pieces(
    "x gamma beta -> y mean inv_std",
    "sums group_norm_sums* x -> stats",
    "merge group_norm_merge* stats -> mean inv_std",
    "apply group_norm_apply* x gamma beta mean inv_std -> y",
)
_group_norm_grad = _in_pieces(
    "x dy gamma mean inv_std -> dx dgamma dbeta",
    "sums group_norm_grad_sums*# x dy gamma mean inv_std -> dgamma dbeta totals",
    "apply group_norm_grad_apply*# x dy gamma mean inv_std totals -> dx",
)


# How operations are cut along the batch and into strips of images.


_NO_ROWS = Batch((), ())


def _cut(
    reads: str, writes: str, traits: NodeTraits = PLAIN, how: Batch = _NO_ROWS
) -> NodeTraits:
    """Return traits with cuts along the batch and into strips, alike.

    Args:
        reads: A letter for each input: `x` has rows, and so have labels, `l`, whose
            axes are others; `-` has none.
        writes: A letter for each result.
        traits: All other traits.
        how: All other fields of both cuts.
    """

    def along(x: int, labels: int) -> Batch:
        axis = {"x": x, "l": labels}.get
        inputs, outputs = tuple(map(axis, reads)), tuple(map(axis, writes))
        return replace(how, inputs=inputs, outputs=outputs)

    return replace(traits, batch=along(0, 0), strips=along(HEIGHT, LABELS))


def _images(cut: NodeTraits, last: ChannelsLast | None = None) -> Operation:
    """Return an operation that is cut into strips if its operands are images."""
    return Operation(replace(cut, strips=None), cut.strips, last)


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


_RELU = _cut("x", "x", NodeTraits(overwrites=(0,), narrow=True))
_RELU_GRAD = _cut("xx", "x", NodeTraits(overwrites=(1,)))
"""A gradient whose inputs are a saved tensor and, second, the result's gradient."""

_NORM = NodeTraits(narrow=True, reads_twice=(0,))
_NORM_GRAD = NodeTraits(overwrites=(1,), reads_twice=(0,))
_NOT_UPDATED = (("update", False),)

_MEAN_OF_VALUES = Batch((), (), averaged=(0,), sliced=partial(counted, 0))
_MEAN_OF_LABELS = Batch((), (), averaged=(0,), sliced=partial(counted, 1))
_NARROW, _READS_NARROW = NodeTraits(narrow=True), NodeTraits(reads_narrow=True)

_ROW = Batch((0,), (0,))

_ROWS = Batch((0, 0), (0,))

_FROM_ONE = NodeTraits(narrow=True, batch=_ROW)


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

_OF_ONE_IMAGE = _images(_cut("x", "x", _NARROW), _ANY)
_FUNCTION_OF_IMAGE = _images(_RELU, _ANY)
_GRADIENT_OF_FUNCTION = _images(_RELU_GRAD, _ANY)
_SUM_OF_IMAGES = _images(
    _cut("xx", "x", NodeTraits(overwrites=(0, 1), joins_branches=True, narrow=True)),
    _ANY,
)
_ADD_CHANNELS = _images(
    _cut("x-", "x", NodeTraits(overwrites=(0,), narrow=True)), _CHANNELS
)
_APPLY_BATCH_NORM = _cut("x----", "x", NodeTraits(overwrites=(0,)))
_MERGE = NodeTraits(recomputable=False)


def _per_channel(traits: NodeTraits, **more: Any) -> Operation:
    """Return an operation with parameters per channel, with changes of its traits."""
    return Operation(replace(traits, **more), channels_last=_CHANNELS)


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
        "add": _SUM_OF_IMAGES,
        "add_relu": _SUM_OF_IMAGES,
        "bias": _ADD_CHANNELS,
        "bias_grad": _images(_cut("x", "-"), _CHANNELS),
        "bias_relu": _ADD_CHANNELS,
        "bias_relu_grad": _images(
            _cut("xx", "x-", NodeTraits(overwrites=(1,))), _CHANNELS
        ),
        "cast": _images(_cut("x", "x"), _ANY),
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
        "multiply": _images(
            _cut("xx", "x", NodeTraits(overwrites=(0, 1), narrow=True)), _ANY
        ),
        # Products.
        "conv": Operation(_conv, cut_conv, _CONV),
        "matmul": Operation(_matmul),
        # Normalizations, whole and in pieces.
        "batch_norm": _per_channel(
            _NORM,
            recompute_as=Recomputation(
                "batch_norm_apply", (0, 1, 2, 6, 7), _APPLY_BATCH_NORM
            ),
            decomposition=_batch_norm,
        ),
        "batch_norm_eval": _images(_cut("x----", "x", _NARROW), _CHANNELS),
        "batch_norm_grad": _per_channel(_NORM_GRAD, decomposition=_batch_norm_grad),
        "batch_norm_sums": _per_channel(
            _cut("x", "-", how=Batch((), (), gathered=(0,)))
        ),
        "batch_norm_merge": Operation(_MERGE),
        "batch_norm_apply": _per_channel(_APPLY_BATCH_NORM),
        "batch_norm_grad_sums": _per_channel(_cut("xx--", "--")),
        "batch_norm_grad_apply": _per_channel(_cut("xx-----", "x"), overwrites=(1,)),
        "batch_norm_relu": _per_channel(
            _NORM, replay=_NOT_UPDATED, decomposition=_batch_norm_relu
        ),
        "batch_norm_relu_grad": _per_channel(
            _NORM_GRAD, reads_twice=(0, 1), decomposition=_batch_norm_relu_grad
        ),
        "batch_norm_add_relu": _per_channel(
            _NORM,
            replay=_NOT_UPDATED,
            joins_branches=True,
            decomposition=_batch_norm_add_relu,
        ),
        "batch_norm_add_relu_grad": _per_channel(
            _NORM_GRAD, decomposition=_batch_norm_add_relu_grad
        ),
        "group_norm": Operation(
            replace(
                _NORM,
                batch=Batch((0, None, None), (0, 0, 0)),
                decomposition=_group_norm,
            ),
            channels_last=_GROUPS,
        ),
        "group_norm_grad": Operation(
            replace(
                _NORM_GRAD,
                batch=Batch((0, 0, None, 0, 0), (0, None, None)),
                decomposition=_group_norm_grad,
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
        "lrn": _images(_cut("x", "x", _NARROW), _CHANNELS),
        "lrn_grad": _images(_cut("xxx", "x", NodeTraits(overwrites=(2,))), _CHANNELS),
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
        "accuracy": _images(
            _cut("xl", "-", _READS_NARROW, Batch((), (), accumulates=True))
        ),
        "mean_squared_error": _images(_cut("xx", "-", how=_MEAN_OF_VALUES)),
        "mean_squared_error_grad": _images(_cut("xx-", "x", how=_MEAN_OF_VALUES)),
        "softmax_cross_entropy": _images(
            _cut("xl", "-x", _READS_NARROW, _MEAN_OF_LABELS)
        ),
        "softmax_cross_entropy_grad": _images(
            _cut("xl-", "x", NodeTraits(overwrites=(0,)), _MEAN_OF_LABELS)
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
    attrs = MappingProxyType(dict(attrs))
    specs = [tensors[t] for t in inputs], [tensors[t] for t in outputs]
    return Node(
        name, op, inputs, outputs, attrs, phase, mutates, traits_of(op, *specs, attrs)
    )


def with_library(tensors: Mapping[str, TensorSpec], node: Node, library: str) -> Node:
    """Return the node with a library's kernel."""
    attrs = MappingProxyType({**node.attrs, LIBRARY: library})
    specs = [tensors[t] for t in node.inputs], [tensors[t] for t in node.outputs]
    return replace(node, attrs=attrs, traits=traits_of(node.op, *specs, attrs))
