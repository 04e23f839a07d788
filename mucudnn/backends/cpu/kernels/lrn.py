"""Local response normalisation across channels (Krizhevsky et al., 2012).

y = x / d^beta, d = k + alpha / size * (sum of x² over neighbouring channels).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import (
    BLOCK_BYTES,
    Attrs,
    KernelCall,
    Part,
    Run,
    as_ncs,
    tiles,
)


def lrn(call: KernelCall) -> None:
    """Divide each element by a power of its neighbourhood's mean square."""
    x, y, attrs = as_ncs(call.inputs[0]), as_ncs(call.outputs[0]), call.attrs

    def columns(n: int, s: slice) -> None:
        np.divide(x[n, :, s], _power(_base(x[n, :, s], attrs), attrs), out=y[n, :, s])

    _each_column(call, x, columns)


def lrn_grad(call: KernelCall) -> None:
    """Compute dx_i = dy_i / d_i^beta - 2 alpha beta / size x_i sum_j dy_j y_j / d_j."""
    x, y, dy = (as_ncs(v) for v in call.inputs)
    dx = as_ncs(call.outputs[0])
    size = call.attrs["size"]
    factor = -2 * call.attrs["alpha"] * call.attrs["beta"] / size

    def columns(n: int, s: slice) -> None:
        base = _base(x[n, :, s], call.attrs)
        share_of = np.multiply(dy[n, :, s], y[n, :, s])
        share_of /= base
        pull = _neighbour_sums(share_of, (size - 1) // 2, size // 2)
        pull *= x[n, :, s]
        pull *= factor
        out = dx[n, :, s]
        np.divide(dy[n, :, s], _power(base, call.attrs), out=out)
        out += pull

    _each_column(call, x, columns)


def _each_column(call: KernelCall, x: Any, fn: Callable[[int, slice], None]) -> None:
    """Call `fn(sample, pixels)` for all channels of some pixels at a time."""
    N, C, S = x.shape
    pixels = tiles((N, S), max(1, BLOCK_BYTES // 2 // x.itemsize // C))

    def block(part: Part) -> None:
        samples, s = part
        for n in range(samples.start, samples.stop):
            fn(n, s)

    call.share(pixels, block)


def _base(x: Any, attrs: Attrs) -> Any:
    size = attrs["size"]
    total = _neighbour_sums(np.square(x), size // 2, (size - 1) // 2)
    total *= attrs["alpha"] / size
    total += attrs["k"]
    return total


def _neighbour_sums(values: Any, before: int, after: int) -> Any:
    """Return sums of channels [c - before, c + after], by doubling; axis 0."""
    C = len(values)
    size = before + after + 1
    padded = np.zeros((C + size - 1, *values.shape[1:]), values.dtype)
    padded[before : before + C] = values
    result: Any = None
    covered = 0
    width = 1
    while True:
        if size & width:
            part = padded[covered : covered + C]
            result = part.copy() if result is None else np.add(result, part, result)
            covered += width
        if 2 * width > size:
            return result
        padded[:-width] += padded[width:]
        width *= 2


def _power(base: Any, attrs: Attrs) -> Any:
    """Compute base^beta, by square roots where possible; may overwrite `base`."""
    beta = attrs["beta"]
    if beta == 0.75:
        root = np.sqrt(base)
        np.sqrt(root, out=base)
        base *= root
        return base
    if beta == 0.5:
        return np.sqrt(base, out=base)
    if beta == 1:
        return base
    return np.power(base, beta, out=base)


OPERATIONS: dict[str, Run] = {"lrn": lrn, "lrn_grad": lrn_grad}
