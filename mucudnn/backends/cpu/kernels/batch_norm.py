"""Batch normalisation (Ioffe and Szegedy, 2015): each channel by its own statistics.

A worker takes as many channels as fit its cache with all their samples. The variance is
a sum of squares about the mean, never a difference of large sums. The output holds the
deviations in between, so they need no extra memory.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.sums import channel_chunks, row_dots, row_sums
from mucudnn.backends.cpu.kernels.tiles import LARGE_BYTES, KernelCall, Run, as_ncs
from mucudnn.backends.cpu.scratch import Scratch

__all__ = [
    "OPERATIONS",
    "Chunks",
    "batch_norm_grad",
    "column",
    "deviations",
    "factor_of",
    "finish_gradient",
    "gradient_scales",
    "normalise",
    "normalise_batch",
    "sums_and_dots",
    "update_running",
]

Chunks = list[tuple[slice, ...]]


def batch_norm(call: KernelCall) -> None:
    """Normalise by the batch's statistics, and update the running ones."""
    normalise_batch(call, lambda part, chunk: None)


def normalise_batch(
    call: KernelCall, finish: Callable[[Any, tuple[slice, ...]], None]
) -> None:
    """Run `batch_norm`, and finish each chunk of the result in place, in the cache.

    `finish` is called with a part of the result, (n, c, s), and its slices.
    """
    x, y = as_ncs(call.inputs[0]), as_ncs(call.outputs[0])
    gamma, beta, running_mean, running_var = call.inputs[1:5]
    mean, inv_std = call.outputs[1:]
    count = x.shape[0] * x.shape[2]

    def block(item: tuple[slice, Chunks]) -> None:
        channels, chunks = item
        total, squares = 0.0, 0.0
        for chunk in chunks:
            total = total + row_sums(x[chunk])
        centre = total / count
        mean[channels] = centre
        for chunk in chunks:
            np.subtract(x[chunk], mean[channels, None], out=y[chunk])
            squares = squares + row_dots(y[chunk], y[chunk])
        inv_std[channels] = 1 / np.sqrt(squares / count + call.attrs["eps"])
        factor = factor_of(gamma[channels], inv_std[channels], x)
        for chunk in chunks:
            part = y[chunk]
            part *= factor
            part += beta[channels, None]
            finish(part, chunk)
        if call.attrs["update"]:
            unbiased = squares / max(1, count - 1)
            update_running(running_mean[channels], centre, call.attrs["momentum"])
            update_running(running_var[channels], unbiased, call.attrs["momentum"])

    call.share(channel_chunks(x.shape, LARGE_BYTES // x.itemsize), block)


def batch_norm_eval(call: KernelCall) -> None:
    """Normalise by the running statistics."""
    x, y = as_ncs(call.inputs[0]), as_ncs(call.outputs[0])
    gamma, beta, mean, var = call.inputs[1:]
    factor = column(gamma / np.sqrt(var.astype(np.float64) + call.attrs["eps"]), x)
    normalise(call, x, y, factor, mean[:, None], beta[:, None])


def batch_norm_grad(call: KernelCall) -> None:
    """Compute gamma inv_std (dy - mean(dy) - x̂ mean(dy x̂)), dgamma and dbeta."""
    x, dy, gamma, mean, inv_std = call.inputs
    dx, dgamma, dbeta = call.outputs
    x, dy, dx = as_ncs(x), as_ncs(dy), as_ncs(dx)

    def block(item: tuple[slice, Chunks]) -> None:
        channels, chunks = item
        centre = mean[channels, None]
        inverse = inv_std[channels].astype(np.float64)
        total, dots = sums_and_dots(x, dy, centre, chunks, call.scratch)
        dbeta[channels] = total
        dgamma[channels] = dots * inverse
        scales = gradient_scales(gamma[channels], inverse, total, dots, x)
        for chunk in chunks:
            deviation = deviations(x[chunk], centre, call.scratch)
            finish_gradient(deviation, dy[chunk], dx[chunk], *scales)

    call.share(channel_chunks(x.shape, LARGE_BYTES // x.itemsize), block)


def normalise(
    call: KernelCall, x: Any, y: Any, factor: Any, centre: Any, shift: Any
) -> None:
    """Compute y = (x - centre) factor + shift, tile by tile; (C, 1) each."""

    def tile(part: tuple[slice, ...]) -> None:
        out, channels = y[part], part[1]
        np.subtract(x[part], centre[channels], out=out)
        out *= factor[channels]
        out += shift[channels]

    call.tiles_of(x, tile, LARGE_BYTES)


def deviations(x: Any, centre: Any, scratch: Scratch) -> Any:
    """Compute x - centre in the scratch memory."""
    return np.subtract(x, centre, out=scratch.like(x))


def sums_and_dots(
    x: Any, dy: Any, centre: Any, chunks: Chunks, scratch: Scratch
) -> tuple[Any, Any]:
    """Sum dy, and dy (x - centre), over the chunks of some channels."""
    total: Any = 0.0
    dots: Any = 0.0
    for chunk in chunks:
        total = total + row_sums(dy[chunk])
        dots = dots + row_dots(deviations(x[chunk], centre, scratch), dy[chunk])
    return total, dots


def factor_of(gamma: Any, inv_std: Any, x: Any) -> Any:
    """Return the factor of deviations, from saved statistics so that reruns agree."""
    return column(gamma * inv_std.astype(np.float64), x)


def gradient_scales(
    gamma: Any, inverse: Any, total: Any, dots: Any, x: Any
) -> tuple[Any, Any, Any]:
    """Return the last arguments of `finish_gradient` from a whole batch's sums."""
    count, factor = x.shape[0] * x.shape[2], gamma * inverse
    along = -factor * inverse**2 * dots / count
    return column(factor, x), column(along, x), column(-factor * total / count, x)


def finish_gradient(
    deviation: Any, dy: Any, out: Any, scale: Any, along: Any, offset: Any
) -> None:
    """Compute `out = dy scale + deviation along + offset`; overwrite `deviation`."""
    deviation *= along
    deviation += offset
    np.multiply(dy, scale, out=out)
    out += deviation


def column(values: Any, like: Any) -> Any:
    """View per-channel numbers as (c, 1) in the type of `like`."""
    return values.astype(like.dtype)[:, None]


def update_running(running: Any, batch: Any, momentum: float) -> None:
    """Update running statistics with those of a batch."""
    running[...] = (1 - momentum) * running.astype(np.float64) + momentum * batch


OPERATIONS: dict[str, Run] = {
    "batch_norm": batch_norm,
    "batch_norm_eval": batch_norm_eval,
    "batch_norm_grad": batch_norm_grad,
}
