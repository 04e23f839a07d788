"""Sums over samples and pixels, one per channel.

BLAS sums a row of pixels in single precision over many lanes. Rows are at most a tile
long, and their sums are added in double precision, in a fixed order.
"""

from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import even, shared, tiles

__all__ = ["LONGEST_ROW", "channel_chunks", "row_dots", "row_sums", "total_dot"]

LONGEST_ROW = 16384
"""Most elements that are summed in single precision."""

_NEIGHBOURS = 64  # least channels at a time where they are contiguous (S = 1)


def channel_chunks(
    shape: tuple[int, ...], limit: int
) -> list[tuple[slice, list[tuple[slice, ...]]]]:
    """Return (channels, the chunks (n, c, s) that cover them) for an array (N, C, S).

    Channels are taken together while all their samples fit in a tile of `limit`
    elements (see `shared`). Otherwise the samples of one channel, or parts of its rows,
    are separate chunks.
    """
    N, C, S = shape
    together = shared(N * C * S, limit) // max(1, N * S)
    most = max(_NEIGHBOURS if S == 1 else 1, together)
    step = even(C, most)
    items: list[tuple[slice, list[tuple[slice, ...]]]] = []
    for first in range(0, C, step):
        channels = slice(first, min(first + step, C))
        width = channels.stop - first
        rows = [
            slice(i, min(i + LONGEST_ROW, S)) for i in range(0, S, LONGEST_ROW)
        ] or [slice(0, 0)]
        longest = max(1, width * min(S, LONGEST_ROW))
        chunks: list[tuple[slice, ...]] = [
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
