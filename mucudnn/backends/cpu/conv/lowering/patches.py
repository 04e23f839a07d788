"""Copy patches of a tensor into a matrix: the lowering of the GEMM algorithms.

Buffers follow the layout: channels first keeps pixels contiguous (rows of channel and
tap, columns of pixels), channels last keeps channels contiguous (rows of pixels,
columns of tap and channel). Both are handed on as the same logical matrix (groups,
reduction, pixels), of which BLAS takes either order.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv.carve import Region
from mucudnn.backends.cpu.conv.lowering.gather import (
    Axis,
    as_matrix,
    overlap,
    tap_windows,
)

__all__ = ["Patches", "matrix_buffer"]


class Patches:
    """Lowers tiles of one tensor for one gather.

    Args:
        axes: What to read along each spatial axis.
        spatial: Spatial shape of the tensor.
        channels: Channels to lower at a time, at most, over all groups.
        samples: Samples to lower at a time, at most.
        tile: Outputs along each axis to lower at a time, at most.
        channels_last: Order of the buffers.
        dtype: Of the tensor.
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
        self._spatial = tuple(spatial)
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
        """Patches of `source` (samples, groups, channels, *spatial) as a matrix.

        Args:
            source: A view of some samples and channels.
            tile: Outputs wanted, with explicit bounds.
            buffers: Arrays of `regions`; overwritten.

        Returns:
            (groups, reduction, pixels); reduction is (channel, *tap) or, channels
            last, (*tap, channel); pixels are (sample, *output).
        """
        windows = self._windows(source, tile, buffers[0])
        rank = len(self._axes)
        taps = tuple(range(3, 3 + rank))
        outs = tuple(range(3 + rank, 3 + 2 * rank))
        reduction = (*taps, 2) if self._last else (2, *taps)
        ordered = windows.transpose(1, *reduction, 0, *outs)
        if (matrix := as_matrix(ordered, 1 + rank, 1 + rank)) is not None:
            return matrix
        columns, matrix = matrix_buffer(
            buffers[1], ordered.shape, 1 + rank, by_column=self._last
        )
        np.copyto(columns, ordered)
        return matrix

    def _windows(self, source: Any, tile: Sequence[slice], buffer: Any) -> Any:
        reads = [
            axis.reads(t.start, t.stop)
            for axis, t in zip(self._axes, tile, strict=True)
        ]
        if all(
            r.start >= 0 and r.stop <= size
            for r, size in zip(reads, self._spatial, strict=True)
        ):
            return tap_windows(source, self._axes, tile, (0,) * len(reads))
        padded = self._padded(buffer, source.shape[:3], [len(r) for r in reads])
        padded[...] = 0
        have, want = overlap(reads, self._spatial)
        np.copyto(padded[(..., *want)], source[(..., *have)])
        return tap_windows(padded, self._axes, tile, [-r.start for r in reads])

    def _padded(self, buffer: Any, lead: Sequence[int], lengths: Sequence[int]) -> Any:
        n, g, c = lead
        size = math.prod(lead) * math.prod(lengths)
        if self._last:
            stored = buffer[:size].reshape(n, *lengths, g, c)
            rank = len(lengths)
            return stored.transpose(0, rank + 1, rank + 2, *range(1, rank + 1))
        return buffer[:size].reshape(*lead, *lengths)


def matrix_buffer(
    buffer: Any, shape: Sequence[int], rows: int, *, by_column: bool
) -> tuple[Any, Any]:
    """One flat buffer as (group, *row axes, *column axes) and as (group, row, column).

    Args:
        buffer: At least as many elements as `shape` has.
        shape: Of the first view.
        rows: How many axes after the first belong to the rows.
        by_column: Columns contiguous in memory one after another, instead of rows.
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
