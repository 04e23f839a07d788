"""Activations, sums and products: one element at a time, any of them in place.

Masks come from comparisons and are spread over the bits of the floats, because a
masked NumPy operation takes a branch an element.
"""

from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.erf import normal_cdf, normal_density
from mucudnn.backends.cpu.kernels.tiles import (
    BLOCK_BYTES,
    Attrs,
    Inputs,
    Outputs,
    Run,
    flat_blocks,
)
from mucudnn.backends.cpu.threads import Workers

__all__ = [
    "OPERATIONS",
    "add",
    "gelu",
    "gelu_grad",
    "keep",
    "leaky_relu",
    "leaky_relu_grad",
    "multiply",
    "relu",
    "relu_grad",
    "scale",
    "sigmoid",
    "sigmoid_grad",
    "tanh",
    "tanh_grad",
]

_FLOOR = {"float32": -87.0, "float64": -708.0}
"""Where a sigmoid is about to leave the normal numbers, and exp(-x) the finite."""


def keep(mask: Any, values: Any, out: Any) -> None:
    """`out = values` where the mask holds, and +0 elsewhere, even for infinities.

    Args:
        mask: Booleans; overwritten.
        values: Floats of the same shape.
        out: May be `values`.
    """
    ones = mask.view(np.int8)
    np.negative(ones, out=ones)  # all bits of a byte
    bits = f"i{values.itemsize}"
    wide = ones.astype(bits)  # its sign fills the word
    np.bitwise_and(values.view(bits), wide, out=out.view(bits))


def add(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """The sum of two tensors."""
    flat_blocks(
        workers, [*inputs, *outputs], lambda a, b, y: np.add(a, b, out=y), _LONG
    )


def multiply(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """The product of two tensors."""
    flat_blocks(
        workers, [*inputs, *outputs], lambda a, b, y: np.multiply(a, b, out=y), _LONG
    )


def scale(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """A tensor times a number."""
    factor = attrs["factor"]
    flat_blocks(
        workers, [*inputs, *outputs], lambda x, y: np.multiply(x, factor, out=y), _LONG
    )


def relu(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """max(x, 0); NaN stays."""
    (x,) = inputs
    # NumPy has no vector code for the maximum with a scalar.
    zeros = np.zeros(min(x.size, BLOCK_BYTES // x.itemsize), x.dtype)
    flat_blocks(
        workers,
        [x, *outputs],
        lambda x, y: np.maximum(x, zeros[: x.size], out=y),
    )


def relu_grad(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """Dy where y is not 0."""

    def block(y: Any, dy: Any, dx: Any) -> None:
        keep(np.not_equal(y, 0), dy, dx)

    flat_blocks(workers, [*inputs, *outputs], block)


def leaky_relu(
    workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs
) -> None:
    """X, or slope times it where negative."""
    slope = attrs["slope"]

    def block(x: Any, y: Any) -> None:
        # |x| and x span both halves: y = a x + b |x|.
        size = np.abs(x)
        size *= (1 - slope) / 2
        np.multiply(x, (1 + slope) / 2, out=y)
        y += size

    flat_blocks(workers, [*inputs, *outputs], block)


def leaky_relu_grad(
    workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs
) -> None:
    """Dy, or slope times it where y is not positive (slope > 0: x neither)."""
    slope = attrs["slope"]

    def block(y: Any, dy: Any, dx: Any) -> None:
        factor = np.greater(y, 0).astype(dy.dtype)
        factor *= 1 - slope
        factor += slope
        np.multiply(dy, factor, out=dx)

    flat_blocks(workers, [*inputs, *outputs], block)


def gelu(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """X times the normal distribution's probability of less than x."""

    def block(x: Any, y: Any) -> None:
        np.multiply(x, normal_cdf(x), out=y)

    flat_blocks(workers, [*inputs, *outputs], block, _MANY)


def gelu_grad(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """Dy times (cdf(x) + x density(x))."""

    def block(x: Any, dy: Any, dx: Any) -> None:
        slope = normal_density(x)
        slope *= x
        slope += normal_cdf(x)
        np.multiply(dy, slope, out=dx)

    flat_blocks(workers, [*inputs, *outputs], block, _MANY)


def sigmoid(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """1 / (1 + exp(-x))."""
    floor = _FLOOR[inputs[0].dtype.name]

    def block(x: Any, y: Any) -> None:
        np.maximum(x, floor, out=y)
        np.negative(y, out=y)
        np.exp(y, out=y)
        y += 1
        np.reciprocal(y, out=y)

    flat_blocks(workers, [*inputs, *outputs], block)


def sigmoid_grad(
    workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs
) -> None:
    """Dy y (1 - y)."""

    def block(y: Any, dy: Any, dx: Any) -> None:
        slope = np.subtract(1, y)
        slope *= y
        np.multiply(dy, slope, out=dx)

    flat_blocks(workers, [*inputs, *outputs], block)


def tanh(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """The hyperbolic tangent."""
    flat_blocks(workers, [*inputs, *outputs], lambda x, y: np.tanh(x, out=y))


def tanh_grad(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """Dy (1 - y²)."""

    def block(y: Any, dy: Any, dx: Any) -> None:
        slope = np.square(y)
        np.subtract(1, slope, out=slope)
        np.multiply(dy, slope, out=dx)

    flat_blocks(workers, [*inputs, *outputs], block)


_LONG = 2 * BLOCK_BYTES  # one pass and no temporary
_MANY = BLOCK_BYTES // 4  # many passes over several temporaries

OPERATIONS: dict[str, Run] = {
    "add": add,
    "gelu": gelu,
    "gelu_grad": gelu_grad,
    "leaky_relu": leaky_relu,
    "leaky_relu_grad": leaky_relu_grad,
    "multiply": multiply,
    "relu": relu,
    "relu_grad": relu_grad,
    "scale": scale,
    "sigmoid": sigmoid,
    "sigmoid_grad": sigmoid_grad,
    "tanh": tanh,
    "tanh_grad": tanh_grad,
}
