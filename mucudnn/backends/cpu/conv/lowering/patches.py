"""Patches of a tensor copied into a matrix: the lowering of the GEMM algorithms.

Buffers follow the layout. Channels first keeps pixels contiguous (rows of channel and
tap, columns of pixels), channels last keeps channels contiguous (rows of pixels,
columns of tap and channel). Both are passed on as the same logical matrix (groups,
reduction, pixels), which BLAS takes in either order.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv.carve import Region
from mucudnn.backends.cpu.conv.lowering.gather import Axis, as_matrix, read_windows

__all__ = ["Patches", "matrix_buffer", "multiply", "packed", "padded_buffer"]


class Patches:
    """A function that lowers tiles of one tensor for one gather.

    `spatial` is the tensor's spatial shape; `channels` (over all groups), `samples` and
    `tile` (outputs along each axis) are upper limits of one call.
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        spatial: Sequence[int],
        channels: int,
        samples: int,
        tile: Sequence[int],
        channels_last: bool,
        dtype: str,
    ) -> None:
        self._axes = tuple(axes)
        self._last = channels_last
        pixels = samples * math.prod(tile)
        taps = math.prod(axis.taps for axis in axes)
        reach = (len(axis.reads(0, t)) for axis, t in zip(axes, tile, strict=True))
        inside = all(
            axis.reads(0, axis.outs).start >= 0
            and axis.reads(0, axis.outs).stop <= size
            for axis, size in zip(axes, spatial, strict=True)
        )
        pointwise = all(
            axis.taps == 1 and axis.out_step == 1 and axis.outs == size
            for axis, size in zip(axes, spatial, strict=True)
        )
        padded = 0 if inside else samples * channels * math.prod(reach)
        own_matrix = inside and pointwise and (channels_last or samples == 1)
        columns = 0 if own_matrix else channels * taps * pixels
        self.regions: list[Region] = [((padded,), dtype), ((columns,), dtype)]

    def lower(self, source: Any, tile: Sequence[slice], buffers: Sequence[Any]) -> Any:
        """Return the patches of `source` (samples, groups, channels, *spatial).

        `tile` has explicit bounds; `buffers` are arrays of `regions`, overwritten.

        Returns: A matrix (groups, reduction, pixels); reduction is (channel, *tap) or,
            channels last, (*tap, channel); pixels are (sample, *output).
        """
        rank = len(self._axes)
        windows = read_windows(
            source,
            self._axes,
            tile,
            lambda spatial: padded_buffer(
                buffers[0], source.shape, spatial, channels_last=self._last
            ),
        )
        taps = tuple(range(3, 3 + rank))
        outs = tuple(range(3 + rank, 3 + 2 * rank))
        reduction = (*taps, 2) if self._last else (2, *taps)
        ordered = windows.transpose(1, *reduction, 0, *outs)
        return packed(ordered, 1 + rank, buffers[1], by_column=self._last)


def padded_buffer(
    buffer: Any, shape: Sequence[int], spatial: Sequence[int], *, channels_last: bool
) -> Any:
    """View a flat buffer as (samples, groups, channels, *spatial), in layout order.

    `shape` is that of any tensor with so many samples, groups and channels.
    """
    n, g, c = shape[:3]
    flat, rank = buffer[: n * g * c * math.prod(spatial)], len(spatial)
    if not channels_last:
        return flat.reshape(n, g, c, *spatial)
    stored = flat.reshape(n, *spatial, g, c)
    return stored.transpose(0, rank + 1, rank + 2, *range(1, rank + 1))


def packed(array: Any, rows: int, buffer: Any, *, by_column: bool) -> Any:
    """View (group, *row axes, *column axes) as (group, row, column) that BLAS can read.

    Copy to the buffer if no such view exists; see `matrix_buffer` for the arguments.
    """
    matrix = as_matrix(array, rows, array.ndim - 1 - rows)
    if matrix is None:
        copy, matrix = matrix_buffer(buffer, array.shape, rows, by_column=by_column)
        np.copyto(copy, array)
    return matrix


def multiply(
    a: Any, b: Any, out: Any, buffer: Any, *, by_column: bool, accumulate: bool
) -> None:
    """Write (or add) a @ b to `out` (group, row, *column axes).

    If BLAS cannot write to `out`, the product goes through the buffer, which is
    column-major with `by_column`.
    """
    if not accumulate and (direct := as_matrix(out, 1, out.ndim - 2)) is not None:
        np.matmul(a, b, out=direct)
        return
    result, product = matrix_buffer(buffer, out.shape, 1, by_column=by_column)
    np.matmul(a, b, out=product)
    if accumulate:
        np.add(out, result, out=out)
    else:
        np.copyto(out, result)


def matrix_buffer(
    buffer: Any, shape: Sequence[int], rows: int, *, by_column: bool
) -> tuple[Any, Any]:
    """View one buffer as (group, *row axes, *column axes) and as (group, row, column).

    Args:
        buffer: Flat, at least as many elements as `shape` has.
        shape: Shape of the first view.
        rows: Number of axes after the first that belong to the rows.
        by_column: Whether the matrices are stored column by column.
    """
    groups, row_shape, column_shape = shape[0], shape[1 : 1 + rows], shape[1 + rows :]
    m, n = math.prod(row_shape), math.prod(column_shape)
    flat = buffer[: groups * m * n]
    if not by_column:
        return flat.reshape(shape), flat.reshape(groups, m, n)
    stored = flat.reshape(groups, *column_shape, *row_shape)
    columns = len(column_shape)
    order = (*range(1 + columns, 1 + columns + rows), *range(1, 1 + columns))
    return stored.transpose(0, *order), flat.reshape(groups, n, m).transpose(0, 2, 1)
