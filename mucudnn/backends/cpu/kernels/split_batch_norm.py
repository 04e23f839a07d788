"""Batch normalisation of slices of a batch, in the pieces that it falls into.

A slice's statistics are its count, its mean and its sum of squares about the mean, in
double precision. Chunks that fit a cache have theirs, too, and are merged as slices
are: the tensor is read once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.batch_norm import (
    Chunks,
    column,
    deviations,
    factor_of,
    finish_gradient,
    move,
    normalise,
    sums_and_dots,
)
from mucudnn.backends.cpu.kernels.sums import channel_chunks, row_dots, row_sums
from mucudnn.backends.cpu.kernels.tiles import LARGE_BYTES, KernelCall, Run, as_ncs

__all__ = ["OPERATIONS", "all_moments", "merged_moments", "moments"]

Moments = tuple[Any, Any, Any]


def batch_norm_sums(call: KernelCall) -> None:
    """(count, mean, sum of squares about it) of each channel, (3, C)."""
    moments(call, as_ncs(call.inputs[0]), call.outputs[0])


def moments(call: KernelCall, x: Any, stats: Any) -> None:
    """Count, mean and squares about it of the channels of (N, C, S)."""

    def block(item: tuple[slice, Chunks]) -> None:
        channels, chunks = item
        found: Moments = (0.0, 0.0, 0.0)
        for chunk in chunks:
            part = x[chunk]
            count = float(part.shape[0] * part.shape[2])
            centre = row_sums(part) / count
            near = centre.astype(x.dtype)
            apart = deviations(part, near[:, None], call.scratch)
            squares = row_dots(apart, apart) - count * (centre - near) ** 2
            found = merged_moments(found, (count, centre, squares))
        for row, values in enumerate(found):
            stats[row, channels] = values

    call.share(channel_chunks(x.shape, LARGE_BYTES // x.itemsize), block)


def batch_norm_merge(call: KernelCall) -> None:
    """Mean and 1 / standard deviation of the batch; moves the running statistics."""
    *slices, running_mean, running_var = call.inputs
    mean, inv_std = call.outputs
    count, centre, squares = all_moments(slices)
    mean[...] = centre
    inv_std[...] = 1 / np.sqrt(squares / count + call.attrs["eps"])
    if call.attrs["update"]:
        unbiased = squares / np.maximum(1, count - 1)
        move(running_mean, centre, call.attrs["momentum"])
        move(running_var, unbiased, call.attrs["momentum"])


def batch_norm_apply(call: KernelCall) -> None:
    """Normalise a slice by the statistics of its batch."""
    x, y = as_ncs(call.inputs[0]), as_ncs(call.outputs[0])
    gamma, beta, mean, inv_std = call.inputs[1:]
    factor = factor_of(gamma, inv_std, x)
    normalise(call, x, y, factor, mean[:, None], beta[:, None])


def batch_norm_grad_sums(call: KernelCall) -> None:
    """A slice's share of dgamma and of dbeta."""
    x, dy, mean, inv_std = call.inputs
    x, dy = as_ncs(x), as_ncs(dy)
    dgamma, dbeta = call.outputs

    def block(item: tuple[slice, Chunks]) -> None:
        channels, chunks = item
        total, dots = sums_and_dots(x, dy, mean[channels, None], chunks, call.scratch)
        dbeta[channels] = total
        dgamma[channels] = dots * inv_std[channels].astype(np.float64)

    call.share(channel_chunks(x.shape, LARGE_BYTES // x.itemsize), block)


def batch_norm_grad_apply(call: KernelCall) -> None:
    """Dx of a slice = gamma inv_std (dy - dbeta / count - x̂ dgamma / count)."""
    x, dy, gamma, mean, inv_std, dgamma, dbeta = call.inputs
    x, dy, dx = as_ncs(x), as_ncs(dy), as_ncs(call.outputs[0])
    inverse = inv_std.astype(np.float64)
    scale = gamma * inverse
    along = column(-scale * inverse * dgamma / call.attrs["count"], x)
    offset = column(-scale * dbeta / call.attrs["count"], x)
    factor, centre = column(scale, x), mean[:, None]

    def tile(part: tuple[slice, ...]) -> None:
        out, channels = dx[part], part[1]
        scales = factor[channels], along[channels], offset[channels]
        apart = deviations(x[part], centre[channels], call.scratch)
        finish_gradient(apart, dy[part], out, *scales)

    call.tiles_of(x, tile, LARGE_BYTES)


def all_moments(slices: Sequence[Any]) -> Moments:
    """Of slices together."""
    found: Moments = (0.0, 0.0, 0.0)
    for stats in slices:
        found = merged_moments(found, tuple(stats))
    count, centre, squares = found
    # A kernel may be timed on numbers that are no statistics.
    return np.maximum(count, 1), centre, np.maximum(squares, 0)


def merged_moments(one: Moments, other: Moments) -> Moments:
    """Of two sets of numbers together (Chan, Golub and LeVeque, 1983).

    Args:
        one: Their count, mean and sum of squares about it, each (C,).
        other: Those of the others.
    """
    count = one[0] + other[0]
    apart = other[1] - one[1]
    mean = one[1] + apart * (other[0] / count)
    return count, mean, one[2] + other[2] + apart**2 * (one[0] * other[0] / count)


OPERATIONS: dict[str, Run] = {
    "batch_norm_apply": batch_norm_apply,
    "batch_norm_grad_apply": batch_norm_grad_apply,
    "batch_norm_grad_sums": batch_norm_grad_sums,
    "batch_norm_merge": batch_norm_merge,
    "batch_norm_sums": batch_norm_sums,
}
