"""Elementwise kernels: activations, sums, products, dropout, reshaping copies.

Masks are comparisons, sign-extended over the bits of the floats, because a masked NumPy
operation takes a branch per element.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.polynomial import chebyshev

from mucudnn.backends.cpu.kernels.tiles import (
    BLOCK_BYTES,
    LARGE_BYTES,
    Attrs,
    KernelCall,
    Run,
    as_ncs,
)
from mucudnn.backends.cpu.threads import Scratch
from mucudnn.backends.tensor_copies import SHAPING, Copies

_MANY = BLOCK_BYTES // 4  # many passes over several temporaries


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
    slope = np.square(x)
    slope *= -0.5
    np.exp(slope, out=slope)
    slope *= 1 / math.sqrt(2 * math.pi)  # the density of a standard normal variable
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


def _operation(copies: Copies) -> Run:
    def run(call: KernelCall) -> None:
        for source, target in copies(call.inputs, call.outputs[0], call.attrs):
            copy_in_tiles(call, source, target)

    return run


def copy_in_tiles(call: KernelCall, source: Any, target: Any) -> None:
    """Write an array or a number into an array; either may have gaps."""
    if not isinstance(source, np.ndarray):
        source = np.asarray(source, target.dtype)
    if not target.ndim:
        target[...] = source
        return
    source = np.broadcast_to(source, target.shape)

    def tile(part: tuple[slice, ...]) -> None:
        target[part] = source[part]

    call.tiles_of(target, tile, 2 * BLOCK_BYTES)


def to_channels_last(call: KernelCall) -> None:
    """Copy (N, C, *spatial) to (N, *spatial, C)."""
    copy_in_tiles(call, as_ncs(call.inputs[0]), _as_ncs_from_last(call.outputs[0]))


def to_channels_first(call: KernelCall) -> None:
    """Copy (N, *spatial, C) to (N, C, *spatial)."""
    copy_in_tiles(call, _as_ncs_from_last(call.inputs[0]), as_ncs(call.outputs[0]))


# Dropout with a mask that is a function of seed, step and position.
#
# Philox (Salmon et al., 2011) encrypts a counter: block b of the positions has the key
# (seed, step) and counts from b 2^64. Any thread can generate any block, and the
# gradient regenerates the mask instead of saving it. Each element takes 16 bits, so the
# probability is p to within 2^-17.


_BLOCK = 65536  # positions per Philox key and counter; defines the mask
_WORD = 1 << 64


def dropout(call: KernelCall) -> None:
    """Compute y = x / (1 - p) or, with probability p, 0.

    A row slice of a tensor begins at position `offset` of the tensor. Slices of images
    are runs of `run` elements, whose starts are `apart` positions distant.
    """
    run = max(1, call.attrs.get("run", call.inputs[0].size))
    x, y = (v.reshape(-1, run) for v in (call.inputs[0], call.outputs[0]))
    p = call.attrs["p"]
    key = call.attrs["seed"] % _WORD | int(call.inputs[1]) % _WORD << 64
    if p >= 1:
        y[...] = 0
        return

    offset, apart = call.attrs.get("offset", 0), call.attrs.get("apart", run)
    threshold = np.uint16(min(round(p * 65536), 65535))
    end = offset + (len(x) - 1) * apart + run if len(x) else offset

    def block(number: int) -> None:
        first, last = number * _BLOCK - offset, (number + 1) * _BLOCK - offset
        rows = range(max(0, first // apart), min(len(x), -(-last // apart)))
        inside = [(r, max(0, first - r * apart), last - r * apart) for r in rows]
        parts = [(r, start, min(run, stop)) for r, start, stop in inside if start < run]
        if not parts:
            return
        # The mask, True for kept elements, of the block's first positions.
        count = parts[-1][0] * apart + parts[-1][2] - first
        source = np.random.Generator(np.random.Philox(key=key, counter=number << 64))
        # Unlike `random_raw`, this releases the interpreter lock.
        words = source.integers(0, _WORD - 1, -(-count // 4), np.uint64, endpoint=True)
        halves = words.astype("<u8", copy=False).view("<u2")[:count]
        mask = np.greater_equal(halves, threshold)
        for row, start, stop in parts:
            here, out = row * apart - first, y[row, start:stop]
            own = mask[here + start : here + stop]
            apply_mask(own, x[row, start:stop], out, call.scratch)
            out *= 1 / (1 - p)

    call.share(range(offset // _BLOCK, -(-end // _BLOCK)), block)


def _as_ncs_from_last(array: Any) -> Any:
    """View (N, *spatial, C) as (N, C, S)."""
    return np.swapaxes(array.reshape(len(array), -1, array.shape[-1]), 1, 2)


_FLOOR = {"float32": -87.0, "float64": -708.0}
"""Least inputs for which sigmoid is a normal number and exp(-x) is finite."""


def rectify(values: Any, out: Any) -> None:
    """Compute `out = max(values, 0)` without negative zeros; NaN stays."""
    # `np.clip` has vector code for the comparison with a scalar, `np.maximum` none.
    np.clip(values, 0, np.inf, out=out)


def apply_mask(mask: Any, values: Any, out: Any, scratch: Scratch) -> None:
    """Compute `out = values` where the mask holds, and +0 elsewhere.

    The zeros are exact even if the values are infinite. The mask, of booleans, is
    overwritten; `out` may be `values`; `scratch` holds the mask in the width of the
    floats.
    """
    ones = mask.view(np.int8)
    np.negative(ones, out=ones)  # 0 or -1: all bits of a byte
    bits = f"i{values.itemsize}"
    wide = scratch.like(values).view(bits)
    np.copyto(wide, ones)  # sign extension fills the word
    np.bitwise_and(values.view(bits), wide, out=out.view(bits))


# The error function on arrays, which NumPy lacks.
#
# `erfc(x) exp(x²)` falls smoothly from 1 to 0. In s = (2 - x) / (2 + x) one polynomial
# approximates it for all relevant x. It is fitted once, at Chebyshev's points, to
# values from `math.erfc` and, where that product would lose digits, from the continued
# fraction (Abramowitz and Stegun, 7.1.14).


_FARTHEST = 6.2  # beyond, 1 - erf(x) is below half a unit in the last place of float64
_LOWEST = (2 - _FARTHEST) / (2 + _FARTHEST)
_DEGREE = {"float32": 8, "float64": 26}


def erf(x: Any) -> Any:
    """Compute the error function, within 1e-15 (float64) or 5e-7 (float32)."""
    tail = _erfc(np.abs(x))
    np.subtract(1, tail, out=tail)
    return np.copysign(tail, x, out=tail)


def normal_cdf(x: Any) -> Any:
    """Compute the probability that a standard normal variable is below x."""
    values = erf(x * math.sqrt(0.5))
    values += 1
    values *= 0.5
    return values


def _erfc(x: Any) -> Any:
    """Compute the complementary error function of x >= 0; overwrite x."""
    np.minimum(x, _FARTHEST, out=x)
    u = np.add(x, 2)
    np.divide(4, u, out=u)
    u -= 1  # s = 4 / (2 + x) - 1
    u -= _LOWEST
    u *= 2 / (1 - _LOWEST)
    u -= 1
    highest, *others = _coefficients(_DEGREE[x.dtype.name])
    values = np.full_like(u, highest)
    for coefficient in others:
        values *= u
        values += coefficient
    np.square(x, out=x)
    np.negative(x, out=x)
    np.exp(x, out=x)
    values *= x
    return values


@functools.lru_cache
def _coefficients(degree: int) -> tuple[float, ...]:
    """Return the polynomial in u, highest power first; u = 1 is x = 0."""
    # Cosines of the angles: Chebyshev's recurrence would lose two digits.
    angles = (np.arange(degree + 1) + 0.5) * (math.pi / (degree + 1))
    points = _LOWEST + (np.cos(angles) + 1) * (1 - _LOWEST) / 2
    values = np.array([_scaled_erfc(2 * (1 - s) / (1 + s)) for s in points])
    waves = np.cos(np.outer(np.arange(degree + 1), angles))
    series = waves @ values * (2 / (degree + 1))
    series[0] /= 2
    return tuple(float(c) for c in chebyshev.cheb2poly(series)[::-1])


def _scaled_erfc(x: float) -> float:
    if x < 1.5:
        return math.erfc(x) * math.exp(x * x)
    fraction = x
    for n in range(200, 0, -1):
        fraction = x + n / 2 / fraction
    return 1 / (math.sqrt(math.pi) * fraction)


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
    **{name: _operation(copies) for name, copies in SHAPING.items()},
    "to_channels_first": to_channels_first,
    "to_channels_last": to_channels_last,
    "dropout": dropout,
}
