"""Batch normalisation followed by an optional sum and a ReLU, in the same tiles.

Tiles are finished while they are in a worker's cache. Without a sum, gradients are
masked when they are first read. The mask is recomputed from the input by the formula of
the forward pass, rounding by rounding, so the result is not read at all.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.batch_norm import (
    Chunks,
    batch_norm_grad,
    deviations,
    factor_of,
    finish_gradient,
    gradient_scales,
    normalise_batch,
)
from mucudnn.backends.cpu.kernels.elementwise import apply_mask, rectify
from mucudnn.backends.cpu.kernels.sums import channel_chunks, row_dots, row_sums
from mucudnn.backends.cpu.kernels.tiles import LARGE_BYTES, KernelCall, Run, as_ncs

__all__ = ["OPERATIONS"]


def batch_norm_relu(call: KernelCall) -> None:
    """Compute max(normalised [+ term], 0); update the running statistics."""
    terms = call.inputs[5:]
    term = as_ncs(terms[0]) if terms else None

    def finish(part: Any, chunk: tuple[slice, ...]) -> None:
        if term is not None:
            part += term[chunk]
        rectify(part, part)

    normalise_batch(call, finish)


def batch_norm_relu_grad(call: KernelCall) -> None:
    """Run `batch_norm_grad` on dy masked to positive inputs of the ReLU."""
    x, dy, gamma, beta, mean, inv_std = call.inputs
    dx, dgamma, dbeta = call.outputs
    x, dy, dx = as_ncs(x), as_ncs(dy), as_ncs(dx)

    def block(item: tuple[slice, Chunks]) -> None:
        channels, chunks = item
        centre, threshold = mean[channels, None], 0.0 - beta[channels, None]
        factor = factor_of(gamma[channels], inv_std[channels], x)
        total: Any = 0.0
        dots: Any = 0.0
        for chunk in chunks:
            part, masked = deviations(x[chunk], centre, call.scratch), dx[chunk]
            part *= factor
            _mask_above(part, threshold, dy[chunk], masked)
            total = total + row_sums(masked)
            deviation = deviations(x[chunk], centre, call.scratch)
            dots = dots + row_dots(deviation, masked)
        inverse = inv_std[channels].astype(np.float64)
        dbeta[channels], dgamma[channels] = total, dots * inverse
        scales = gradient_scales(gamma[channels], inverse, total, dots, x)
        for chunk in chunks:
            deviation = deviations(x[chunk], centre, call.scratch)
            finish_gradient(deviation, dx[chunk], dx[chunk], *scales)

    call.share(channel_chunks(x.shape, LARGE_BYTES // x.itemsize), block)


def batch_norm_add_relu_grad(call: KernelCall) -> None:
    """Compute the term's gradient, dy where y is not 0, and the others."""
    x, dy, y, *parameters = call.inputs
    dterm, *others = call.outputs

    def mask(y: Any, dy: Any, out: Any) -> None:
        apply_mask(np.not_equal(y, 0), dy, out, call.scratch)

    # Flat, as masks are slow on rows as short as a channel's.
    call.flat_blocks([y, dy, dterm], mask, LARGE_BYTES)
    batch_norm_grad(replace(call, inputs=[x, dterm, *parameters], outputs=others))


def _mask_above(scaled: Any, threshold: Any, dy: Any, out: Any) -> None:
    """Compute `out = dy` where `scaled` exceeds the threshold, else 0.

    Overwrites `scaled`. The floating-point difference has the sign of the exact one,
    and is +0 for equal numbers, as no threshold is -0. Its sign bit is spread over the
    word. NaN may or may not pass: its channel's gradient is NaN anyway.
    """
    kind = f"i{scaled.itemsize}"
    np.subtract(threshold, scaled, out=scaled)
    mask = scaled.view(kind)
    np.right_shift(mask, 8 * scaled.itemsize - 1, out=mask)
    np.bitwise_and(mask, dy.view(kind), out=out.view(kind))


OPERATIONS: dict[str, Run] = {
    "batch_norm_add_relu": batch_norm_relu,
    "batch_norm_add_relu_grad": batch_norm_add_relu_grad,
    "batch_norm_relu": batch_norm_relu,
    "batch_norm_relu_grad": batch_norm_relu_grad,
}
