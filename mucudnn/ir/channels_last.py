"""Describe operations on images stored channels last, with shape (N, *spatial, C).

Such a tensor has the layout `NHWC` and its shape as stored. Few operations need a
kernel of their own for this layout:

* elementwise operations (ReLU) do not depend on the layout;
* operations with one number per channel see (M, C): every pixel of every sample counts
  as a sample without spatial axes;
* sliding windows see (N, 1, *spatial, C): a single channel with one more spatial axis,
  along which each window has width 1;
* group normalization sees (N, pixels, C), and its kernel is passed `channels_last`.

Operations without `Operation.channels_last` support channels-first images only.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from mucudnn.ir.conv import LAYOUTS
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.operations import OPERATIONS, Attributes, ChannelsLast, channels_to_end
from mucudnn.ir.tensor import TensorSpec

Specs = tuple[TensorSpec, ...]

AUTO: Literal["auto"] = "auto"

LAYOUT_CHOICES = (*LAYOUTS, AUTO)
"""Channels first, channels last, or the faster of the two for each image."""


def is_image(spec: TensorSpec) -> bool:
    """Return whether a tensor has channels and pixels; filters count, too."""
    return len(spec.shape) > 2


def last(spec: TensorSpec, name: str) -> TensorSpec:
    """Return the channels-last copy of a channels-first image, in its own storage."""
    own = replace(spec, name=name, alias=None, offset=0, layout="NHWC")
    return replace(own, shape=channels_to_end(spec.shape))


def channels_last(
    op: str, images: Sequence[TensorSpec], attrs: Attributes
) -> ChannelsLast | None:
    """Return how an operation runs on channels-last images; None if it cannot."""
    known = OPERATIONS.get(op)
    how = None if known is None else known.channels_last
    if how is None or any(len(spec.shape) > how.axes for spec in images):
        return None
    return how if how.is_supported(attrs) else None


def operands_of(graph: Graph, node: Node) -> tuple[Specs, Specs, Attributes]:
    """Return inputs, outputs and attributes of a node as passed to its kernel."""
    inputs = tuple(graph.tensors[name] for name in node.inputs)
    outputs = tuple(graph.tensors[name] for name in node.outputs)
    if all(spec.layout == "NCHW" for spec in (*inputs, *outputs)):
        return inputs, outputs, node.attrs
    # Channels-last images keep their bytes and get a shape that existing kernels know.
    known = OPERATIONS.get(node.op)
    if known is None or (how := known.channels_last) is None:
        return inputs, outputs, node.attrs

    def viewed(specs: Specs) -> Specs:
        return tuple(
            spec
            if spec.layout == "NCHW"
            else replace(spec, shape=how.kernel_shape(spec.shape))
            for spec in specs
        )

    return viewed(inputs), viewed(outputs), how.kernel_attrs(node.attrs)
