"""One number a channel added, and its gradient: sums over everything but channels."""

from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.elementwise import keep, rectify
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
    """Y = x + b, b of shape (C,) along axis 1."""
    x, y = as_ncs(call.inputs[0]), as_ncs(call.outputs[0])
    b = call.inputs[1][:, None]

    def tile(part: tuple[slice, ...]) -> None:
        np.add(x[part], b[part[1]], out=y[part])

    call.tiles_of(x, tile, LARGE_BYTES)


def bias_relu(call: KernelCall) -> None:
    """max(x + b, 0)."""
    x, y = as_ncs(call.inputs[0]), as_ncs(call.outputs[0])
    b = call.inputs[1][:, None]

    def tile(part: tuple[slice, ...]) -> None:
        out = y[part]
        np.add(x[part], b[part[1]], out=out)
        rectify(out, out)

    call.tiles_of(x, tile, LARGE_BYTES)


def bias_relu_grad(call: KernelCall) -> None:
    """Dy where y is not 0, and its sum over samples and pixels."""
    y, dy, dx = (as_ncs(a) for a in (*call.inputs, call.outputs[0]))
    db = call.outputs[1]
    limit = LONGEST_ROW if dy.shape[2] > LONGEST_ROW else BLOCK_BYTES // dy.itemsize
    parts = tiles(dy.shape, limit)  # dense, as masks are slow on short rows
    sums: list[Any] = [0.0] * len(parts)

    def tile(index: int) -> None:
        part = parts[index]
        masked = dx[part]
        keep(np.not_equal(y[part], 0), dy[part], masked, call.scratch)
        sums[index] = row_sums(masked)

    call.share(range(len(parts)), tile)
    total = np.zeros(db.shape)
    for part, found in zip(parts, sums, strict=True):
        total[part[1]] += found
    db[...] = total


def bias_grad(call: KernelCall) -> None:
    """The sum of dy over samples and pixels."""
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
