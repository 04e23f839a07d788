"""Operations on images whose channels are last in memory: shapes (N, *spatial, C).

Such a tensor has the layout `NHWC` and its shape as it is stored. Hardly an operation
needs a kernel of its own for that, as most are ones that kernels know already:

* what has no regard to places, like a ReLU, is the same in any layout;
* what has a number for each channel works on (M, C), all pixels of all samples being
  samples without pixels;
* windows slide over (N, 1, *spatial, C): one channel of images that have an axis more,
  along which a window is one wide;
* groups of channels are seen as (N, pixels, C), and their kernels are told.

Operations that are not in the table work on images with channels first.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from mucudnn.ir.conv import LAYOUTS
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.tensor import TensorSpec

__all__ = [
    "AUTO",
    "CHANNELS_LAST",
    "LAYOUT_CHOICES",
    "channels_last",
    "is_image",
    "last",
    "operands_of",
]

Attributes = Mapping[str, Any]
Shape = tuple[int, ...]
Specs = tuple[TensorSpec, ...]

AUTO: Literal["auto"] = "auto"

LAYOUT_CHOICES = (*LAYOUTS, AUTO)
"""Channels first, channels last, or each image as is fastest."""

_MOST_WINDOWED = 4
"""Axes of the images that windows slide over; with channels last, kernels see one more
and have three spatial ones at most."""


@dataclass(frozen=True, slots=True)
class ChannelsLast:
    """How an operation works on images with channels last.

    Attributes:
        attrs: (attributes with channels first, axes of an image) -> the node's.
        seen: The node's attributes -> what its kernel is given.
        view: The shape of an image -> what its kernel is given.
        axes: Of images at most.
        able: The node's attributes -> whether there is such a kernel.
    """

    attrs: Callable[[Attributes, int], Attributes] = lambda attrs, rank: attrs
    seen: Callable[[Attributes], Attributes] = lambda attrs: attrs
    view: Callable[[Shape], Shape] = lambda shape: shape
    axes: int = 5
    able: Callable[[Attributes], bool] = lambda attrs: True


def is_image(spec: TensorSpec) -> bool:
    """Whether a tensor has channels and pixels; a filter has."""
    return len(spec.shape) > 2


def last(spec: TensorSpec, name: str) -> TensorSpec:
    """What an image, channels first, is with its channels last, in bytes of its own."""
    own = replace(spec, name=name, alias=None, offset=0, layout="NHWC")
    return replace(own, shape=_turned(spec.shape))


def channels_last(
    op: str, images: Sequence[TensorSpec], attrs: Attributes
) -> ChannelsLast | None:
    """How an operation works on such images, if it can."""
    how = CHANNELS_LAST.get(op)
    if how is None or any(len(spec.shape) > how.axes for spec in images):
        return None
    return how if how.able(attrs) else None


def operands_of(graph: Graph, node: Node) -> tuple[Specs, Specs, Attributes]:
    """Inputs, results and attributes of a node as its kernel is given them.

    Images with channels last are the same bytes in a shape that kernels know.
    """
    inputs = tuple(graph.tensors[name] for name in node.inputs)
    outputs = tuple(graph.tensors[name] for name in node.outputs)
    how = CHANNELS_LAST.get(node.op)
    if how is None or all(spec.layout == "NCHW" for spec in (*inputs, *outputs)):
        return inputs, outputs, node.attrs

    def seen(specs: Specs) -> Specs:
        return tuple(
            spec if spec.layout == "NCHW" else replace(spec, shape=how.view(spec.shape))
            for spec in specs
        )

    return seen(inputs), seen(outputs), how.seen(node.attrs)


def _by_channel(shape: Shape) -> Shape:
    return math.prod(shape[:-1]), shape[-1]


def _by_pixel(shape: Shape) -> Shape:
    return shape[0], math.prod(shape[1:-1]), shape[-1]


def _told(attrs: Attributes) -> Attributes:
    return {**attrs, "channels_last": True}


def _by_group(attrs: Attributes) -> bool:
    return not attrs["per_element"]


def _one_axis_more(shape: Shape) -> Shape:
    return shape[0], 1, *shape[1:]


def _windows(attrs: Attributes) -> Attributes:
    """Windows one wide along the channels."""
    extra = {"kernel": 1, "stride": 1, "padding": 0, "extra": 0}
    return {**attrs, **{k: (*attrs[k], n) for k, n in extra.items() if k in attrs}}


def _sides(attrs: Attributes) -> Attributes:
    return {**attrs, "scale": (*attrs["scale"], 1)}


def _turned(values: Sequence[int]) -> Shape:
    """Numbers of axes (N, C, *spatial) in the order (N, *spatial, C)."""
    n, c, *spatial = values
    return n, *spatial, c


def _joined(attrs: Attributes, rank: int) -> Attributes:
    return {**attrs, "axis": _turned(range(rank)).index(attrs["axis"])}


def _boxed(attrs: Attributes, rank: int) -> Attributes:
    return {name: _turned(values) for name, values in attrs.items()}


def _convolution(attrs: Attributes, rank: int) -> Attributes:
    return {**attrs, "problem": replace(attrs["problem"], layout="NHWC")}


_ANY = ChannelsLast()
_CHANNELS = ChannelsLast(view=_by_channel)
_POOL = ChannelsLast(seen=_windows, view=_one_axis_more, axes=_MOST_WINDOWED)
_RESAMPLE = ChannelsLast(seen=_sides, view=_one_axis_more, axes=_MOST_WINDOWED)
_BOX = ChannelsLast(attrs=_boxed)
_GROUPS = ChannelsLast(seen=_told, view=_by_pixel, able=_by_group)

CHANNELS_LAST: Mapping[str, ChannelsLast] = MappingProxyType(
    {
        "add": _ANY,
        "add_relu": _ANY,
        "avg_pool": _POOL,
        "avg_pool_grad": _POOL,
        "batch_norm": _CHANNELS,
        "batch_norm_add_relu": _CHANNELS,
        "batch_norm_add_relu_grad": _CHANNELS,
        "batch_norm_apply": _CHANNELS,
        "batch_norm_eval": _CHANNELS,
        "batch_norm_grad": _CHANNELS,
        "batch_norm_grad_apply": _CHANNELS,
        "batch_norm_grad_sums": _CHANNELS,
        "batch_norm_relu": _CHANNELS,
        "batch_norm_relu_grad": _CHANNELS,
        "batch_norm_sums": _CHANNELS,
        "bias": _CHANNELS,
        "bias_grad": _CHANNELS,
        "bias_relu": _CHANNELS,
        "bias_relu_grad": _CHANNELS,
        "cast": _ANY,
        "concat": ChannelsLast(attrs=_joined),
        "conv": ChannelsLast(attrs=_convolution),
        "gelu": _ANY,
        "gelu_grad": _ANY,
        "group_norm": _GROUPS,
        "group_norm_grad": _GROUPS,
        "identity": _ANY,
        "leaky_relu": _ANY,
        "leaky_relu_grad": _ANY,
        "lrn": _CHANNELS,
        "lrn_grad": _CHANNELS,
        "max_pool": _POOL,
        "max_pool_grad": _POOL,
        "multiply": _ANY,
        "pad": _BOX,
        "relu": _ANY,
        "relu_grad": _ANY,
        "scale": _ANY,
        "sigmoid": _ANY,
        "sigmoid_grad": _ANY,
        "slice": _BOX,
        "tanh": _ANY,
        "tanh_grad": _ANY,
        "upsample_bilinear": _RESAMPLE,
        "upsample_bilinear_grad": _RESAMPLE,
        "upsample_nearest": _RESAMPLE,
        "upsample_nearest_grad": _RESAMPLE,
    }
)
"""Operation -> how it works on images with channels last."""
