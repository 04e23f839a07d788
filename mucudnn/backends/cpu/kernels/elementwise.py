"""Activations, sums and products of elements; all may run in place.

Masks are comparisons, sign-extended over the bits of the floats, because a masked NumPy
operation takes a branch per element.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.erf import normal_cdf, normal_density
from mucudnn.backends.cpu.kernels.tiles import (
    BLOCK_BYTES,
    LARGE_BYTES,
    Attrs,
    KernelCall,
    Run,
)
from mucudnn.backends.cpu.scratch import Scratch

__all__ = ["OPERATIONS", "apply_mask", "rectify"]

_MANY = BLOCK_BYTES // 4  # many passes over several temporaries

_FLOOR = {"float32": -87.0, "float64": -708.0}
"""Least inputs for which sigmoid is a normal number and exp(-x) is finite."""


def rectify(values: Any, out: Any) -> None:
    """Compute `out = max(values, 0)` without negative zeros; NaN stays."""
    # `np.clip` has vector code for the comparison with a scalar, `np.maximum` none.
    np.clip(values, 0, np.inf, out=out)


def apply_mask(mask: Any, values: Any, out: Any, scratch: Scratch) -> None:
    """Compute `out = values` where the mask holds, and +0 elsewhere.

    The zeros are exact even if the values are infinite.

    Args:
        mask: Booleans; overwritten.
        values: Floats of the same shape.
        out: May be `values`.
        scratch: Memory for the mask in the width of the floats.
    """
    ones = mask.view(np.int8)
    np.negative(ones, out=ones)  # 0 or -1: all bits of a byte
    bits = f"i{values.itemsize}"
    wide = scratch.like(values).view(bits)
    np.copyto(wide, ones)  # sign extension fills the word
    np.bitwise_and(values.view(bits), wide, out=out.view(bits))


def add_relu(attrs: Attrs, a: Any, b: Any, y: Any) -> None:
    """Compute max(a + b, 0); NaN stays."""
    np.add(a, b, out=y)
    rectify(y, y)


def relu_grad(call: KernelCall) -> None:
    """Compute dy where y is not 0."""

    def block(y: Any, dy: Any, dx: Any) -> None:
        apply_mask(np.not_equal(y, 0), dy, dx, call.scratch)

    call.flat_blocks([*call.inputs, *call.outputs], block)


def leaky_relu(attrs: Attrs, x: Any, y: Any) -> None:
    """Compute x, or slope x where x is negative."""
    slope = attrs["slope"]
    # Without a branch: y = a x + b |x|.
    size = np.abs(x)
    size *= (1 - slope) / 2
    np.multiply(x, (1 + slope) / 2, out=y)
    y += size


def leaky_relu_grad(attrs: Attrs, y: Any, dy: Any, dx: Any) -> None:
    """Compute dy, or slope dy where y is not positive (slope > 0: nor is x)."""
    factor = np.greater(y, 0).astype(dy.dtype)
    factor *= 1 - attrs["slope"]
    factor += attrs["slope"]
    np.multiply(dy, factor, out=dx)


def gelu_grad(attrs: Attrs, x: Any, dy: Any, dx: Any) -> None:
    """Compute dy (cdf(x) + x density(x))."""
    slope = normal_density(x)
    slope *= x
    slope += normal_cdf(x)
    np.multiply(dy, slope, out=dx)


def sigmoid(attrs: Attrs, x: Any, y: Any) -> None:
    """Compute 1 / (1 + exp(-x))."""
    np.maximum(x, _FLOOR[x.dtype.name], out=y)
    np.negative(y, out=y)
    np.exp(y, out=y)
    y += 1
    np.reciprocal(y, out=y)


def sigmoid_grad(attrs: Attrs, y: Any, dy: Any, dx: Any) -> None:
    """Compute dy y (1 - y)."""
    slope = np.subtract(1, y)
    slope *= y
    np.multiply(dy, slope, out=dx)


def tanh_grad(attrs: Attrs, y: Any, dy: Any, dx: Any) -> None:
    """Compute dy (1 - y²)."""
    slope = np.square(y)
    np.subtract(1, slope, out=slope)
    np.multiply(dy, slope, out=dx)


def _each(formula: Callable[..., object], nbytes: int = BLOCK_BYTES) -> Run:
    """Make a kernel of a formula (attributes, tiles of inputs …, output tile)."""

    def run(call: KernelCall) -> None:
        block = functools.partial(formula, call.attrs)
        call.flat_blocks([*call.inputs, *call.outputs], block, nbytes)

    return run


OPERATIONS: dict[str, Run] = {
    "add": _each(lambda _, a, b, y: np.add(a, b, out=y), LARGE_BYTES),
    "add_relu": _each(add_relu, LARGE_BYTES),
    "gelu": _each(lambda _, x, y: np.multiply(x, normal_cdf(x), out=y), _MANY),
    "gelu_grad": _each(gelu_grad, _MANY),
    "leaky_relu": _each(leaky_relu),
    "leaky_relu_grad": _each(leaky_relu_grad),
    "multiply": _each(lambda _, a, b, y: np.multiply(a, b, out=y), LARGE_BYTES),
    "relu": _each(lambda _, x, y: rectify(x, y), LARGE_BYTES),
    "relu_grad": relu_grad,
    "scale": _each(lambda of, x, y: np.multiply(x, of["factor"], out=y), LARGE_BYTES),
    "sigmoid": _each(sigmoid),
    "sigmoid_grad": _each(sigmoid_grad),
    "tanh": _each(lambda _, x, y: np.tanh(x, out=y)),
    "tanh_grad": _each(tanh_grad),
}
