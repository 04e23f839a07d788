"""Batch normalisation (Ioffe and Szegedy, 2015), whole, fused and in slices.

A worker takes as many channels as fit its cache with all their samples. The variance is
a sum of squares about the mean, never a difference of large sums. The output holds the
deviations in between, so they need no extra memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.elementwise import apply_mask, rectify
from mucudnn.backends.cpu.kernels.reductions import channel_chunks, row_dots, row_sums
from mucudnn.backends.cpu.kernels.tiles import (
    LARGE_BYTES,
    KernelCall,
    Part,
    Run,
    as_ncs,
)
from mucudnn.backends.cpu.threads import Scratch


def batch_norm(call: KernelCall) -> None:
    """Normalise by the batch's statistics, and update the running ones."""
    normalise_batch(call, lambda part, chunk: None)


def batch_norm_eval(call: KernelCall) -> None:
    """Normalise by the running statistics."""
    x, y = as_ncs(call.inputs[0]), as_ncs(call.outputs[0])
    gamma, beta, mean, var = call.inputs[1:]
    factor = column(gamma / np.sqrt(var.astype(np.float64) + call.attrs["eps"]), x)
    normalise(call, x, y, factor, mean[:, None], beta[:, None])


def batch_norm_grad(call: KernelCall) -> None:
    """Compute gamma inv_std (dy - mean(dy) - x̂ mean(dy x̂)), dgamma and dbeta."""
    x, dy, gamma, mean, inv_std = call.inputs
    dy = as_ncs(dy)
    _gradient(call, (x, gamma, mean, inv_std), dy, dy.__getitem__)


# Batch normalisation followed by an optional sum and a ReLU, in the same tiles.
#
# Tiles are finished while they are in a worker's cache. Without a sum, gradients are
# masked when they are first read. The mask is recomputed from the input by the formula
# of the forward pass, rounding by rounding, so the result is not read at all.


def batch_norm_relu(call: KernelCall) -> None:
    """Compute max(normalised [+ term], 0); update the running statistics."""
    terms = call.inputs[5:]
    term = as_ncs(terms[0]) if terms else None

    def finish(part: Any, chunk: Part) -> None:
        if term is not None:
            part += term[chunk]
        rectify(part, part)

    normalise_batch(call, finish)


def batch_norm_relu_grad(call: KernelCall) -> None:
    """Run `batch_norm_grad` on dy masked to positive inputs of the ReLU."""
    x, dy, gamma, beta, mean, inv_std = call.inputs
    images, dy, dx = as_ncs(x), as_ncs(dy), as_ncs(call.outputs[0])

    def masked(chunk: Part) -> Any:
        channels = chunk[1]
        part = deviations(images[chunk], mean[channels, None], call.scratch)
        part *= factor_of(gamma[channels], inv_std[channels], images)
        _mask_above(part, 0.0 - beta[channels, None], dy[chunk], dx[chunk])
        return dx[chunk]

    _gradient(call, (x, gamma, mean, inv_std), dx, masked)


def batch_norm_add_relu_grad(call: KernelCall) -> None:
    """Compute the gradients of the term (dy where y is not 0), x, gamma and beta."""
    x, dy, y, *parameters = call.inputs
    dterm, *others = call.outputs

    def mask(y: Any, dy: Any, out: Any) -> None:
        apply_mask(np.not_equal(y, 0), dy, out, call.scratch)

    # Flat, as masks are slow on rows as short as a channel's.
    call.flat_blocks([y, dy, dterm], mask, LARGE_BYTES)
    batch_norm_grad(replace(call, inputs=[x, dterm, *parameters], outputs=others))


# Batch normalisation of batch slices, split into per-slice and merging operations.
#
# A slice's statistics are its count, its mean and its sum of squares about the mean, in
# double precision. Chunks that fit a cache have statistics too, which are merged like
# those of slices: the tensor is read once.


Moments = tuple[Any, Any, Any]


def batch_norm_sums(call: KernelCall) -> None:
    """Compute count, mean, and squares about the mean of each channel, (3, C)."""
    moments(call, as_ncs(call.inputs[0]), call.outputs[0])


def moments(call: KernelCall, x: Any, stats: Any) -> None:
    """Write count, mean, and squares about the mean of the channels of (N, C, S)."""

    def block(item: tuple[slice, Chunks]) -> None:
        channels, chunks = item
        found: Moments = (0.0, 0.0, 0.0)
        for chunk in chunks:
            part = x[chunk]
            count = float(part.shape[0] * part.shape[2])
            centre = row_sums(part) / count
            near = centre.astype(x.dtype)
            deviation = deviations(part, near[:, None], call.scratch)
            # Corrects for the rounding of the mean to the tensor's type.
            correction = count * (centre - near) ** 2
            squares = row_dots(deviation, deviation) - correction
            found = merged_moments(found, (count, centre, squares))
        for row, values in enumerate(found):
            stats[row, channels] = values

    call.share(channel_chunks(x.shape, LARGE_BYTES // x.itemsize), block)


def batch_norm_merge(call: KernelCall) -> None:
    """Compute the batch's mean and inv_std; update the running statistics."""
    *slices, running_mean, running_var = call.inputs
    mean, inv_std = call.outputs
    count, centre, squares = all_moments(slices)
    mean[...] = centre
    inv_std[...] = 1 / np.sqrt(squares / count + call.attrs["eps"])
    if call.attrs["update"]:
        unbiased = squares / np.maximum(1, count - 1)
        update_running(running_mean, centre, call.attrs["momentum"])
        update_running(running_var, unbiased, call.attrs["momentum"])


def batch_norm_apply(call: KernelCall) -> None:
    """Normalise a slice by the statistics of its batch."""
    x, y = as_ncs(call.inputs[0]), as_ncs(call.outputs[0])
    gamma, beta, mean, inv_std = call.inputs[1:]
    normalise(call, x, y, factor_of(gamma, inv_std, x), mean[:, None], beta[:, None])


def batch_norm_grad_sums(call: KernelCall) -> None:
    """Compute a slice's share of dgamma and of dbeta."""
    x, dy, mean, inv_std = call.inputs
    x, dy = as_ncs(x), as_ncs(dy)
    dgamma, dbeta = call.outputs

    def block(item: tuple[slice, Chunks]) -> None:
        channels, chunks = item
        centre = mean[channels, None]
        total, dots = sums_and_dots(x, dy.__getitem__, centre, chunks, call.scratch)
        dbeta[channels] = total
        dgamma[channels] = dots * inv_std[channels].astype(np.float64)

    call.share(channel_chunks(x.shape, LARGE_BYTES // x.itemsize), block)


def batch_norm_grad_apply(call: KernelCall) -> None:
    """Compute a slice's gamma inv_std (dy - (dbeta + x̂ dgamma) / count)."""
    x, dy, gamma, mean, inv_std, dgamma, dbeta = call.inputs
    x, dy, dx = as_ncs(x), as_ncs(dy), as_ncs(call.outputs[0])
    inverse = inv_std.astype(np.float64)
    scale = gamma * inverse
    along = column(-scale * inverse * dgamma / call.attrs["count"], x)
    offset = column(-scale * dbeta / call.attrs["count"], x)
    factor, centre = column(scale, x), mean[:, None]

    def tile(part: Part) -> None:
        out, channels = dx[part], part[1]
        scales = factor[channels], along[channels], offset[channels]
        deviation = deviations(x[part], centre[channels], call.scratch)
        finish_gradient(deviation, dy[part], out, *scales)

    call.tiles_of(x, tile, LARGE_BYTES)


def all_moments(slices: Sequence[Any]) -> Moments:
    """Merge the moments of slices."""
    found: Moments = (0.0, 0.0, 0.0)
    for stats in slices:
        found = merged_moments(found, tuple(stats))
    count, centre, squares = found
    # A kernel may be timed on random numbers that are no valid statistics.
    return np.maximum(count, 1), centre, np.maximum(squares, 0)


def merged_moments(one: Moments, other: Moments) -> Moments:
    """Merge two moments (Chan, Golub and LeVeque, 1983)."""
    count = one[0] + other[0]
    gap = other[1] - one[1]
    mean = one[1] + gap * (other[0] / count)
    return count, mean, one[2] + other[2] + gap**2 * (one[0] * other[0] / count)


def _mask_above(scaled: Any, threshold: Any, dy: Any, out: Any) -> None:
    """Compute `out = dy` where `scaled` exceeds the threshold, else 0."""
    kind = f"i{scaled.itemsize}"
    # Overwrite `scaled`. The floating-point difference has the sign of the exact one,
    # and is +0 for equal numbers, as no threshold is -0. Its sign bit is spread over
    # the word. NaN may or may not pass: its channel's gradient is NaN anyway.
    np.subtract(threshold, scaled, out=scaled)
    mask = scaled.view(kind)
    np.right_shift(mask, 8 * scaled.itemsize - 1, out=mask)
    np.bitwise_and(mask, dy.view(kind), out=out.view(kind))


Chunks = list[Part]


def normalise_batch(call: KernelCall, finish: Callable[[Any, Part], None]) -> None:
    """Run `batch_norm`, and finish each chunk of the result in place, in the cache.

    `finish` is called with a part of the result, (n, c, s), and its slices.
    """
    x, y = as_ncs(call.inputs[0]), as_ncs(call.outputs[0])
    gamma, beta, running_mean, running_var = call.inputs[1:5]
    mean, inv_std = call.outputs[1:]
    count = x.shape[0] * x.shape[2]

    def block(item: tuple[slice, Chunks]) -> None:
        channels, chunks = item
        # Mean first: deviations are squared, so that large means cancel nothing.
        total, squares = 0.0, 0.0
        for chunk in chunks:
            total = total + row_sums(x[chunk])
        centre = total / count
        mean[channels] = centre
        for chunk in chunks:
            np.subtract(x[chunk], mean[channels, None], out=y[chunk])
            squares = squares + row_dots(y[chunk], y[chunk])
        inv_std[channels] = 1 / np.sqrt(squares / count + call.attrs["eps"])
        # y holds the deviations of the second pass.
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


def normalise(
    call: KernelCall, x: Any, y: Any, factor: Any, centre: Any, shift: Any
) -> None:
    """Compute y = (x - centre) factor + shift, tile by tile; (C, 1) each."""

    def tile(part: Part) -> None:
        out, channels = y[part], part[1]
        np.subtract(x[part], centre[channels], out=out)
        out *= factor[channels]
        out += shift[channels]

    call.tiles_of(x, tile, LARGE_BYTES)


def deviations(x: Any, centre: Any, scratch: Scratch) -> Any:
    """Compute x - centre in the scratch memory."""
    return np.subtract(x, centre, out=scratch.like(x))


def _gradient(
    call: KernelCall, operands: Sequence[Any], dy: Any, read: Callable[[Part], Any]
) -> None:
    """Compute dx, dgamma and dbeta from (x, gamma, mean, inv_std).

    `read` returns a chunk of the gradient when it is first needed; then it is in `dy`.
    """
    x, gamma, mean, inv_std = operands
    dx, dgamma, dbeta = call.outputs
    x, dx = as_ncs(x), as_ncs(dx)
    count = x.shape[0] * x.shape[2]

    def block(item: tuple[slice, Chunks]) -> None:
        channels, chunks = item
        centre = mean[channels, None]
        inverse = inv_std[channels].astype(np.float64)
        total, dots = sums_and_dots(x, read, centre, chunks, call.scratch)
        dbeta[channels], dgamma[channels] = total, dots * inverse
        factor = gamma[channels] * inverse
        along = column(-factor * inverse**2 * dots / count, x)
        scales = column(factor, x), along, column(-factor * total / count, x)
        # Deviations are computed again, as storing them takes more memory.
        for chunk in chunks:
            deviation = deviations(x[chunk], centre, call.scratch)
            finish_gradient(deviation, dy[chunk], dx[chunk], *scales)

    call.share(channel_chunks(x.shape, LARGE_BYTES // x.itemsize), block)


def sums_and_dots(
    x: Any, read: Callable[[Part], Any], centre: Any, chunks: Chunks, scratch: Scratch
) -> tuple[Any, Any]:
    """Sum a gradient dy, and dy (x - centre), over the chunks of some channels."""
    total: Any = 0.0
    dots: Any = 0.0
    for chunk in chunks:
        dy = read(chunk)
        total = total + row_sums(dy)
        dots = dots + row_dots(deviations(x[chunk], centre, scratch), dy)
    return total, dots


def factor_of(gamma: Any, inv_std: Any, x: Any) -> Any:
    """Return the factor of deviations, from saved statistics so that reruns agree."""
    return column(gamma * inv_std.astype(np.float64), x)


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
    "batch_norm_add_relu": batch_norm_relu,
    "batch_norm_add_relu_grad": batch_norm_add_relu_grad,
    "batch_norm_relu": batch_norm_relu,
    "batch_norm_relu_grad": batch_norm_relu_grad,
    "batch_norm_apply": batch_norm_apply,
    "batch_norm_grad_apply": batch_norm_grad_apply,
    "batch_norm_grad_sums": batch_norm_grad_sums,
    "batch_norm_merge": batch_norm_merge,
    "batch_norm_sums": batch_norm_sums,
}
