"""Describe operations on images stored channels last, with shape (N, *spatial, C).

Such a tensor has the layout `NHWC` and its shape as stored. Few operations need a
kernel of their own for this layout:

* elementwise operations (ReLU) do not depend on the layout;
* operations with one number per channel see (M, C): every pixel of every sample counts
  as a sample without spatial axes;
* sliding windows see (N, 1, *spatial, C): a single channel with one more spatial axis,
  along which each window has width 1;
* group normalization sees (N, pixels, C), and its kernel is passed `channels_last`.

Operations that are not in the table support channels-first images only.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from mucudnn.ir.conv import LAYOUTS
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.tensor import TensorSpec

Attributes = Mapping[str, Any]
Shape = tuple[int, ...]
Specs = tuple[TensorSpec, ...]

AUTO: Literal["auto"] = "auto"

LAYOUT_CHOICES = (*LAYOUTS, AUTO)
"""Channels first, channels last, or the faster of the two for each image."""

_MOST_WINDOWED = 4
"""Maximum rank of windowed images: channels last adds one axis, and kernels support at
most three spatial axes."""


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


def is_image(spec: TensorSpec) -> bool:
    """Return whether a tensor has channels and pixels; filters count, too."""
    return len(spec.shape) > 2


def last(spec: TensorSpec, name: str) -> TensorSpec:
    """Return the channels-last copy of a channels-first image, in its own storage."""
    own = replace(spec, name=name, alias=None, offset=0, layout="NHWC")
    return replace(own, shape=_channels_to_end(spec.shape))


def channels_last(
    op: str, images: Sequence[TensorSpec], attrs: Attributes
) -> ChannelsLast | None:
    """Return how an operation runs on channels-last images; None if it cannot."""
    how = CHANNELS_LAST.get(op)
    if how is None or any(len(spec.shape) > how.axes for spec in images):
        return None
    return how if how.is_supported(attrs) else None


def operands_of(graph: Graph, node: Node) -> tuple[Specs, Specs, Attributes]:
    """Return inputs, outputs and attributes of a node as passed to its kernel.

    Channels-last images keep their bytes and get a shape that existing kernels know.
    """
    inputs = tuple(graph.tensors[name] for name in node.inputs)
    outputs = tuple(graph.tensors[name] for name in node.outputs)
    how = CHANNELS_LAST.get(node.op)
    if how is None or all(spec.layout == "NCHW" for spec in (*inputs, *outputs)):
        return inputs, outputs, node.attrs

    def viewed(specs: Specs) -> Specs:
        return tuple(
            spec
            if spec.layout == "NCHW"
            else replace(spec, shape=how.kernel_shape(spec.shape))
            for spec in specs
        )

    return viewed(inputs), viewed(outputs), how.kernel_attrs(node.attrs)


def _one_axis_more(shape: Shape) -> Shape:
    return shape[0], 1, *shape[1:]


def _windows_along_channels(attrs: Attributes) -> Attributes:
    """Extend windows by one axis, the channels, with width 1."""
    extra = {"kernel": 1, "stride": 1, "padding": 0, "extra": 0}
    return {**attrs, **{k: (*attrs[k], n) for k, n in extra.items() if k in attrs}}


def _channels_to_end(values: Sequence[int]) -> Shape:
    """Permute per-axis values from (N, C, *spatial) to (N, *spatial, C)."""
    n, c, *spatial = values
    return n, *spatial, c


_ANY = ChannelsLast()
_CHANNELS = ChannelsLast(kernel_shape=lambda shape: (math.prod(shape[:-1]), shape[-1]))
_POOL = ChannelsLast(
    kernel_attrs=_windows_along_channels,
    kernel_shape=_one_axis_more,
    axes=_MOST_WINDOWED,
)
_RESAMPLE = ChannelsLast(
    kernel_attrs=lambda attrs: {**attrs, "scale": (*attrs["scale"], 1)},
    kernel_shape=_one_axis_more,
    axes=_MOST_WINDOWED,
)
_BOX = ChannelsLast(
    attrs=lambda attrs, rank: {k: _channels_to_end(v) for k, v in attrs.items()}
)
_CONCAT = ChannelsLast(
    attrs=lambda attrs, rank: {
        **attrs,
        "axis": _channels_to_end(range(rank)).index(attrs["axis"]),
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

CHANNELS_LAST: Mapping[str, ChannelsLast] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("add", "add_relu", "cast", "gelu", "gelu_grad", "identity"),
                *("leaky_relu", "leaky_relu_grad", "multiply", "relu", "relu_grad"),
                *("scale", "sigmoid", "sigmoid_grad", "tanh", "tanh_grad"),
            ),
            _ANY,
        ),
        **dict.fromkeys(
            (
                *("batch_norm", "batch_norm_add_relu", "batch_norm_add_relu_grad"),
                *("batch_norm_apply", "batch_norm_eval", "batch_norm_grad"),
                *("batch_norm_grad_apply", "batch_norm_grad_sums", "batch_norm_relu"),
                *("batch_norm_relu_grad", "batch_norm_sums", "bias", "bias_grad"),
                *("bias_relu", "bias_relu_grad", "lrn", "lrn_grad"),
            ),
            _CHANNELS,
        ),
        **dict.fromkeys(
            ("avg_pool", "avg_pool_grad", "max_pool", "max_pool_grad"), _POOL
        ),
        **dict.fromkeys(
            (
                *("upsample_bilinear", "upsample_bilinear_grad"),
                *("upsample_nearest", "upsample_nearest_grad"),
            ),
            _RESAMPLE,
        ),
        "concat": _CONCAT,
        "conv": _CONV,
        "group_norm": _GROUPS,
        "group_norm_grad": _GROUPS,
        "pad": _BOX,
        "slice": _BOX,
    }
)
"""Operation -> its channels-last form."""
