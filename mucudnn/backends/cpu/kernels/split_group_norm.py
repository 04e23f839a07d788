"""Group and layer normalisation of image strips, split into per-strip operations.

A group's rows within a strip are contiguous, so its moments are those of one channel of
a batch normalisation, sample by sample.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.group_norm import (
    Grouped,
    Part,
    affine_grads,
    input_grad,
    weighted_sums,
)
from mucudnn.backends.cpu.kernels.split_batch_norm import all_moments, moments
from mucudnn.backends.cpu.kernels.tiles import BLOCK_BYTES, KernelCall, Run, tiles

__all__ = ["OPERATIONS"]


def group_norm_sums(call: KernelCall) -> None:
    """Compute (count, mean, sum of squares about it) of each group, (3, N, groups)."""
    (x,), (stats,) = call.inputs, call.outputs
    moments(call, x.reshape(1, stats[0].size, -1), stats.reshape(len(stats), -1))


def group_norm_merge(call: KernelCall) -> None:
    """Compute the mean and inv_std of each group."""
    mean, inv_std = call.outputs
    count, centre, squares = all_moments(call.inputs)
    mean[...] = centre
    inv_std[...] = 1 / np.sqrt(squares / count + call.attrs["eps"])


def group_norm_apply(call: KernelCall) -> None:
    """Normalise a strip by the statistics of its image."""
    grouped = Grouped.of(call.inputs[0], call.attrs)
    x, y = (v.reshape(grouped.shape) for v in (call.inputs[0], call.outputs[0]))
    gamma, beta = (v.reshape(grouped.affine) for v in call.inputs[1:3])
    mean, inv_std = (v[..., None, None] for v in call.inputs[3:])

    def tile(part: Part) -> None:
        out, affine = y[part], grouped.affine_part(part)
        np.subtract(x[part], mean[part[:2]], out=out)
        out *= inv_std[part[:2]]
        out *= gamma[affine]
        out += beta[affine]

    _in_tiles(call, grouped, tile)


def group_norm_grad_sums(call: KernelCall) -> None:
    """Compute a strip's share of dgamma and dbeta, and of its groups' sums."""
    grouped = Grouped.of(call.inputs[0], call.attrs)
    x, dy = (v.reshape(grouped.shape) for v in call.inputs[:2])
    gamma = call.inputs[2].reshape(grouped.affine)
    mean, inv_std = (v[..., None, None] for v in call.inputs[3:])
    dgamma, dbeta = (v.reshape(grouped.affine) for v in call.outputs[:2])
    totals = call.outputs[2]
    affine_grads(call, grouped, (x, dy, mean, inv_std), dgamma, dbeta)

    def block(part: tuple[slice, slice]) -> None:
        for place, found in enumerate(weighted_sums(grouped, x, dy, gamma, mean, part)):
            totals[place][part] = found

    call.share(grouped.groups(x.itemsize), block)


def group_norm_grad_apply(call: KernelCall) -> None:
    """Compute dx of a strip from the sums of its whole image."""
    grouped = Grouped.of(call.inputs[0], call.attrs)
    x, dy = (v.reshape(grouped.shape) for v in call.inputs[:2])
    gamma = call.inputs[2].reshape(grouped.affine)
    mean, inv_std = (v[..., None, None] for v in call.inputs[3:5])
    total, dots = call.inputs[5].astype(np.float64)
    dx = call.outputs[0].reshape(grouped.shape)
    inv, count = inv_std[..., 0, 0].astype(np.float64), call.attrs["count"]
    offset = (-inv * total / count).astype(x.dtype)[..., None, None]
    along = (-(inv**3) * dots / count).astype(x.dtype)[..., None, None]

    def tile(part: Part) -> None:
        group = part[:2]
        numbers = mean[group], inv_std[group], along[group], offset[group]
        affine = gamma[grouped.affine_part(part)]
        input_grad(x[part], dy[part], affine, numbers, dx[part])

    _in_tiles(call, grouped, tile)


def _in_tiles(call: KernelCall, grouped: Grouped, tile: Callable[[Part], Any]) -> None:
    call.share(tiles(grouped.shape, BLOCK_BYTES // call.inputs[0].itemsize), tile)


OPERATIONS: dict[str, Run] = {
    "group_norm_apply": group_norm_apply,
    "group_norm_grad_apply": group_norm_grad_apply,
    "group_norm_grad_sums": group_norm_grad_sums,
    "group_norm_merge": group_norm_merge,
    "group_norm_sums": group_norm_sums,
}
