"""Batch normalisation with a sum and a ReLU behind it, in the tiles of the first.

What `batch_norm` leaves in a worker's cache is finished there. Without a sum gradients
are masked where they are first read, and the mask is told from the input by the formula
of the forward pass, rounding by rounding, so that its result is not read at all.
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
from mucudnn.backends.cpu.kernels.elementwise import keep, rectify
from mucudnn.backends.cpu.kernels.sums import channel_chunks, row_dots, row_sums
from mucudnn.backends.cpu.kernels.tiles import LARGE_BYTES, KernelCall, Run, as_ncs

__all__ = ["OPERATIONS"]


def batch_norm_relu(call: KernelCall) -> None:
    """max(normalised + term, 0), if there is a term; moves the running statistics."""
    terms = call.inputs[5:]
    term = as_ncs(terms[0]) if terms else None

    def finish(part: Any, chunk: tuple[slice, ...]) -> None:
        if term is not None:
            part += term[chunk]
        rectify(part, part)

    normalise_batch(call, finish)


def batch_norm_relu_grad(call: KernelCall) -> None:
    """As `batch_norm_grad` of the gradient where the ReLU's input is positive."""
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
            _pass(part, threshold, dy[chunk], masked)
            total = total + row_sums(masked)
            apart = deviations(x[chunk], centre, call.scratch)
            dots = dots + row_dots(apart, masked)
        inverse = inv_std[channels].astype(np.float64)
        dbeta[channels], dgamma[channels] = total, dots * inverse
        scales = gradient_scales(gamma[channels], inverse, total, dots, x)
        for chunk in chunks:
            apart = deviations(x[chunk], centre, call.scratch)
            finish_gradient(apart, dx[chunk], dx[chunk], *scales)

    call.share(channel_chunks(x.shape, LARGE_BYTES // x.itemsize), block)


def batch_norm_add_relu_grad(call: KernelCall) -> None:
    """The gradient where the result is not 0, which is the term's, and the others.

    Masks are made of dense memory, whose rows are longer than a channel's.
    """
    x, dy, y, *parameters = call.inputs
    dterm, *others = call.outputs

    def mask(y: Any, dy: Any, out: Any) -> None:
        keep(np.not_equal(y, 0), dy, out, call.scratch)

    call.flat_blocks([y, dy, dterm], mask, LARGE_BYTES)
    batch_norm_grad(replace(call, inputs=[x, dterm, *parameters], outputs=others))


def _pass(scaled: Any, threshold: Any, dy: Any, out: Any) -> None:
    """`out = dy` where `scaled` is above the threshold, else 0; overwrites `scaled`.

    A difference of floats has the sign of the exact one, and where they are equal it is
    +0, as no threshold is -0: its sign is spread over the word. What is NaN may pass or
    not: its channel's gradient is NaN.
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
