"""Convolutions and their adjoints."""

from typing import TYPE_CHECKING

from mucudnn.arguments import an_integer
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.initializers import HeNormal, Initializer
from mucudnn.ir.layers.affine import biased
from mucudnn.ir.shapes import Ints, channels as channels_of, per_axis

if TYPE_CHECKING:
    from mucudnn.ir.builder import GraphBuilder

__all__ = ["conv", "conv_transpose"]


def conv(
    g: "GraphBuilder",
    x: str,
    channels: int,
    kernel: Ints,
    *,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    bias: bool | Initializer = True,
    initializer: Initializer | None = None,
    name: str = "conv",
) -> str:
    """Convolve to `channels` channels, in 1, 2 or 3 dimensions.

    `bias` is whether to add a bias, or its initializer.
    """
    shape, depth = g.shape(x), channels_of(x, g.shape(x))
    kernels = per_axis("kernel", kernel, len(shape) - 2, 1)
    problem = ConvProblem(
        direction=Direction.FORWARD,
        x_shape=shape,
        w_shape=(
            an_integer("channels", channels, least=1),
            max(1, depth // an_integer("groups", groups, least=1)),
            *kernels,
        ),
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        dtype=g.spec(x).dtype,
    )
    with g.scope(name):
        return biased(g, _weighted(g, x, problem, initializer), bias)


def conv_transpose(
    g: "GraphBuilder",
    x: str,
    channels: int,
    kernel: Ints,
    *,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    bias: bool | Initializer = True,
    initializer: Initializer | None = None,
    name: str = "conv_transpose",
) -> str:
    """Apply the adjoint of a convolution, which up-samples by `stride`.

    Its weight has shape (C, channels // groups, *kernel), as in PyTorch.
    """
    shape, depth = g.shape(x), channels_of(x, g.shape(x))
    kernels, steps, pads, dilations, extra = (
        per_axis(label, value, len(shape) - 2, least)
        for label, value, least in (
            ("kernel", kernel, 1),
            ("stride", stride, 1),
            ("padding", padding, 0),
            ("dilation", dilation, 1),
            ("output_padding", output_padding, 0),
        )
    )
    spatial = map(_transposed_size, shape[2:], kernels, steps, pads, dilations, extra)
    problem = ConvProblem(
        direction=Direction.BACKWARD_DATA,
        x_shape=(shape[0], an_integer("channels", channels, least=1), *spatial),
        w_shape=(
            depth,
            max(1, channels // an_integer("groups", groups, least=1)),
            *kernels,
        ),
        stride=steps,
        padding=pads,
        dilation=dilations,
        groups=groups,
        dtype=g.spec(x).dtype,
    )
    if problem.y_shape != shape:
        raise ValueError(f"output_padding {extra} must be below stride {steps}")
    with g.scope(name):
        return biased(g, _weighted(g, x, problem, initializer), bias)


def _transposed_size(
    size: int, kernel: int, step: int, pad: int, dilation: int, more: int
) -> int:
    """Return an input size that a convolution maps to `size`."""
    return (size - 1) * step - 2 * pad + dilation * (kernel - 1) + 1 + more


def _weighted(
    g: "GraphBuilder", x: str, problem: ConvProblem, initializer: Initializer | None
) -> str:
    """Append a convolution node with its own weight."""
    forward = problem.direction is Direction.FORWARD
    out = problem.y_shape if forward else problem.x_shape
    start = HeNormal() if initializer is None else initializer
    w = g.parameter("weight", problem.w_shape, start)
    return g.append("conv", (x, w), out, problem=problem)
