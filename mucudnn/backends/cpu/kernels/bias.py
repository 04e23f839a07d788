"""Per-channel bias, and its gradient: sums over everything but channels."""

from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.elementwise import apply_mask, rectify
from mucudnn.backends.cpu.kernels.sums import LONGEST_ROW, channel_chunks, row_sums
from mucudnn.backends.cpu.kernels.tiles import (
    BLOCK_BYTES,
    LARGE_BYTES,
    KernelCall,
    Run,
    as_ncs,
    tiles,
)

__all__ = ["OPERATIONS"]


def bias(call: KernelCall) -> None:
    """Compute y = x + b, b of shape (C,) along axis 1."""
    _add_bias(call, relu=False)


def bias_relu(call: KernelCall) -> None:
    """Compute max(x + b, 0)."""
    _add_bias(call, relu=True)


def _add_bias(call: KernelCall, *, relu: bool) -> None:
    x, y = as_ncs(call.inputs[0]), as_ncs(call.outputs[0])
    b = call.inputs[1][:, None]

    def tile(part: tuple[slice, ...]) -> None:
        out = y[part]
        np.add(x[part], b[part[1]], out=out)
        if relu:
            rectify(out, out)

    call.tiles_of(x, tile, LARGE_BYTES)


def bias_relu_grad(call: KernelCall) -> None:
    """Compute dy where y is not 0, and its sum over samples and pixels."""
    y, dy, dx = (as_ncs(a) for a in (*call.inputs, call.outputs[0]))
    db = call.outputs[1]
    limit = LONGEST_ROW if dy.shape[2] > LONGEST_ROW else BLOCK_BYTES // dy.itemsize
    parts = tiles(dy.shape, limit)  # long rows: masks are slow on short ones
    sums: list[Any] = [0.0] * len(parts)

    def tile(index: int) -> None:
        part = parts[index]
        masked = dx[part]
        apply_mask(np.not_equal(y[part], 0), dy[part], masked, call.scratch)
        sums[index] = row_sums(masked)

    call.share(range(len(parts)), tile)
    total = np.zeros(db.shape)
    for part, found in zip(parts, sums, strict=True):
        total[part[1]] += found
    db[...] = total


def bias_grad(call: KernelCall) -> None:
    """Sum dy over samples and pixels."""
    dy, db = as_ncs(call.inputs[0]), call.outputs[0]

    def block(item: tuple[slice, list[tuple[slice, ...]]]) -> None:
        channels, chunks = item
        total: Any = 0.0
        for chunk in chunks:
            total = total + row_sums(dy[chunk])
        db[channels] = total

    call.share(channel_chunks(dy.shape, LARGE_BYTES // dy.itemsize), block)


OPERATIONS: dict[str, Run] = {
    "bias": bias,
    "bias_grad": bias_grad,
    "bias_relu": bias_relu,
    "bias_relu_grad": bias_relu_grad,
}
