"""Bias, channel sums and matrix products."""

from functools import partial
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.elementwise import apply_mask, rectify
from mucudnn.backends.cpu.kernels.tiles import (
    BLOCK_BYTES,
    LARGE_BYTES,
    KernelCall,
    Part,
    Run,
    as_ncs,
    even,
    shared,
    tiles,
)


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

    def block(item: tuple[slice, list[Part]]) -> None:
        channels, chunks = item
        total: Any = 0.0
        for chunk in chunks:
            total = total + row_sums(dy[chunk])
        db[channels] = total

    call.share(channel_chunks(dy.shape, LARGE_BYTES // dy.itemsize), block)


_PANELS = 16  # at most; enough to balance a few workers
_NARROWEST = 64  # columns; below, BLAS spends its time packing


def matmul(call: KernelCall) -> None:
    """Compute y = a b, with optional transpositions."""
    a, b = call.inputs
    a = a.T if call.attrs["transpose_a"] else a
    b = b.T if call.attrs["transpose_b"] else b
    (y,) = call.outputs
    by_rows = y.shape[0] > y.shape[1]
    size = max(y.shape)
    step = max(_NARROWEST, -(-size // _PANELS // _NARROWEST) * _NARROWEST)

    def panel(start: int) -> None:
        part = slice(start, start + step)
        if by_rows:
            np.matmul(a[part], b, out=y[part])
        else:
            np.matmul(a, b[:, part], out=y[:, part])

    call.share(range(0, size, step), panel)


def _add_bias(call: KernelCall, *, relu: bool) -> None:
    """Compute y = x + b, b of shape (C,) along axis 1, or max(x + b, 0)."""
    x, y = as_ncs(call.inputs[0]), as_ncs(call.outputs[0])
    b = call.inputs[1][:, None]

    def tile(part: Part) -> None:
        out = y[part]
        np.add(x[part], b[part[1]], out=out)
        if relu:
            rectify(out, out)

    call.tiles_of(x, tile, LARGE_BYTES)


# Sums over samples and pixels, one per channel.
#
# BLAS sums a row of pixels in single precision over many lanes. Rows are at most a tile
# long, and their sums are added in double precision, in a fixed order.


LONGEST_ROW = 16384
"""Most elements that are summed in single precision."""

_NEIGHBOURS = 64  # least channels at a time where they are contiguous (S = 1)


def channel_chunks(
    shape: tuple[int, ...], limit: int
) -> list[tuple[slice, list[Part]]]:
    """Return (channels, the chunks (n, c, s) that cover them) for an array (N, C, S).

    Channels are taken together while all their samples fit in a tile of `limit`
    elements (see `shared`). Otherwise the samples of one channel, or parts of its rows,
    are separate chunks.
    """
    N, C, S = shape
    together = shared(N * C * S, limit) // max(1, N * S)
    most = max(_NEIGHBOURS if S == 1 else 1, together)
    step = even(C, most)
    items: list[tuple[slice, list[Part]]] = []
    for first in range(0, C, step):
        channels = slice(first, min(first + step, C))
        width = channels.stop - first
        starts = range(0, S, LONGEST_ROW) or [0]
        rows = [slice(i, min(i + LONGEST_ROW, S)) for i in starts]
        longest = max(1, width * min(S, LONGEST_ROW))
        chunks: list[Part] = [
            (n, channels, s) for s in rows for (n,) in tiles((N,), limit // longest)
        ]
        items.append((channels, chunks))
    return items


def row_sums(chunk: Any) -> Any:
    """Sum (n, c, s) over n and s: (c,) in float64."""
    if chunk.shape[2] == 1:
        return np.add.reduce(_add_pairs(chunk[..., 0]), axis=0, dtype=np.float64)
    ones = np.ones(chunk.shape[2], chunk.dtype)
    return np.add.reduce(np.matmul(chunk, ones), axis=0, dtype=np.float64)


def row_dots(a: Any, b: Any) -> Any:
    """Sum a * b over n and s: (c,) in float64."""
    if a.shape[2] == 1:
        products = np.multiply(a[..., 0], b[..., 0])
        return np.add.reduce(_add_pairs(products), axis=0, dtype=np.float64)
    return np.add.reduce(np.vecdot(a, b), axis=0, dtype=np.float64)


def total_dot(a: Any, b: Any) -> float:
    """Sum a * b over two flat arrays, row by row."""
    total = 0.0
    for start in range(0, a.size, LONGEST_ROW):
        part = slice(start, start + LONGEST_ROW)
        total += float(np.dot(a[part], b[part]))
    return total


def _add_pairs(rows: Any) -> Any:
    """Add rows in pairs until few are left, so that few are cast to float64."""
    while len(rows) > 16:
        half = len(rows) // 2
        rest = rows[2 * half :]
        folded = np.add(rows[:half], rows[half : 2 * half])
        if len(rest):
            folded[:1] += rest
        rows = folded
    return rows


OPERATIONS: dict[str, Run] = {
    "bias": partial(_add_bias, relu=False),
    "bias_grad": bias_grad,
    "bias_relu": partial(_add_bias, relu=True),
    "bias_relu_grad": bias_relu_grad,
    "matmul": matmul,
}
