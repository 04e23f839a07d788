"""Lowering of convolutions to patches: strides, gathers and copies.

All three directions gather patches of one tensor and multiply them by a matrix. Along
one spatial axis a gather is five integers (`Axis`): output `m` and tap `j` read element
`start + m * out_step + j * tap_step`. A forward convolution is one gather. Backward
data with stride s is s gathers an axis, one per residue class of input positions, each
with the filter taps that reach it (so no multiplication by inserted zeros).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mucudnn.backends.cpu.conv.algorithm import Region
from mucudnn.ir.conv import ConvProblem

Cut = tuple[slice, tuple[slice, ...]]
"""Samples, and outputs along each spatial axis, of one tile."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Element read by output m and tap j: start + m * out_step + j * tap_step."""

    start: int
    out_step: int
    outs: int
    tap_step: int
    taps: int

    def reads(self, m0: int, m1: int) -> range:
        """Return the range of positions that outputs [m0, m1) read."""
        first = self.start + m0 * self.out_step
        last = self.start + (m1 - 1) * self.out_step
        reach = (self.taps - 1) * self.tap_step
        return range(first + min(0, reach), last + max(0, reach) + 1)

    def inside(self, tap: int, size: int, m0: int, m1: int) -> tuple[int, int]:
        """Return the outputs within [m0, m1) whose tap reads inside [0, size)."""
        at = self.start + tap * self.tap_step
        low = max(m0, -(at // self.out_step))
        high = min(m1, (size - 1 - at) // self.out_step + 1)
        return low, max(low, high)


@dataclass(frozen=True, slots=True)
class Gather:
    """Patches to read, an `Axis` each, filter taps for them, and outputs to write.

    `taps` are slices of the filter's kernel axes, `outs` of the result's spatial axes.
    """

    axes: tuple[Axis, ...]
    taps: tuple[slice, ...]
    outs: tuple[slice, ...]

    @property
    def num_taps(self) -> int:
        """Filter taps per channel."""
        return math.prod(axis.taps for axis in self.axes)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Outputs along each spatial axis."""
        return tuple(axis.outs for axis in self.axes)


def pointwise(axes: Sequence[Axis], spatial: Sequence[int]) -> bool:
    """Return whether each output reads exactly the pixel at its own position."""
    return all(
        (axis.start, axis.out_step, axis.taps, axis.outs) == (0, 1, 1, size)
        for axis, size in zip(axes, spatial, strict=True)
    )


def forward_gather(problem: ConvProblem) -> Gather:
    """Return the gather of x for a forward convolution or a filter gradient."""
    axes = tuple(
        Axis(-pad, step, outs, dil, k)
        for pad, step, outs, dil, k in zip(
            problem.padding,
            problem.stride,
            problem.y_shape[2:],
            problem.dilation,
            problem.w_shape[2:],
            strict=True,
        )
    )
    everything = (slice(None),) * len(axes)
    return Gather(axes, everything, everything)


def backward_gathers(problem: ConvProblem) -> Iterator[Gather]:
    """Yield the gathers of dy for backward data; unreached outputs have none."""
    choices = [list(_backward_axis(problem, i)) for i in range(len(problem.stride))]
    for combination in itertools.product(*choices):
        axes, taps, outs = zip(*combination, strict=True)
        yield Gather(tuple(axes), tuple(taps), tuple(outs))


def _backward_axis(problem: ConvProblem, i: int) -> Iterator[tuple[Axis, slice, slice]]:
    size, kernel = problem.x_shape[2 + i], problem.w_shape[2 + i]
    step, dil, pad = problem.stride[i], problem.dilation[i], problem.padding[i]
    shared = math.gcd(step, dil)
    for first in range(min(step, size)):
        reached = [r for r in range(kernel) if (first + pad - r * dil) % step == 0]
        if not reached:
            continue
        start = (first + pad - reached[0] * dil) // step
        outs = len(range(first, size, step))
        axis = Axis(start, 1, outs, -(dil // shared), len(reached))
        yield axis, slice(reached[0], None, step // shared), slice(first, None, step)


def grouped(array: Any, groups: int, axis: int) -> Any:
    """Split a channel axis into (groups, channels of a group); return a view."""
    size, stride = array.shape[axis], array.strides[axis]
    shape = (*array.shape[:axis], groups, size // groups, *array.shape[axis + 1 :])
    before, after = array.strides[:axis], array.strides[axis + 1 :]
    strides = (*before, stride * (size // groups), stride, *after)
    return as_strided(array, shape, strides)


def overlap(
    reads: Sequence[range], sizes: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the part of a tensor inside a padded block, as slices of both.

    `reads` are the positions of the block along each axis; some may be outside.
    """
    inner, outer = [], []
    for r, size in zip(reads, sizes, strict=True):
        start = min(max(r.start, 0), size)
        stop = max(start, min(r.stop, size))
        inner.append(slice(start, stop))
        outer.append(slice(start - r.start, stop - r.start))
    return tuple(inner), tuple(outer)


def tap_windows(
    source: Any, axes: Sequence[Axis], tile: Sequence[slice], offset: Sequence[int]
) -> Any:
    """Return a view (…, *taps, *outs of the tile) of `source`, which needs no padding.

    Along each axis `offset` is the index of position 0.
    """
    lead = source.ndim - len(axes)
    starts = (
        slice(axis.start + o + t.start * axis.out_step, None)
        for axis, o, t in zip(axes, offset, tile, strict=True)
    )
    strides = [*zip(axes, source.strides[lead:], strict=True)]
    return as_strided(
        source[(..., *starts)],
        (
            *source.shape[:lead],
            *(axis.taps for axis in axes),
            *(t.stop - t.start for t in tile),
        ),
        (
            *source.strides[:lead],
            *(axis.tap_step * stride for axis, stride in strides),
            *(axis.out_step * stride for axis, stride in strides),
        ),
    )


def as_matrix(array: Any, rows: int, columns: int) -> Any:
    """View (…, *row axes, *column axes) as (…, row, column), or return None.

    None means that the view needs a copy, or that NumPy would copy it for BLAS.
    """
    lead = array.ndim - rows - columns
    row = _collapse(array.shape[lead:-columns], array.strides[lead:-columns])
    column = _collapse(array.shape[-columns:], array.strides[-columns:])
    if row is None or column is None:
        return None
    (m, row_stride), (n, column_stride) = row, column
    item = array.itemsize
    if n == 1:  # the stride of a single element is free: choose what BLAS accepts
        column_stride = item
        row_stride = row_stride if m > 1 else item
    elif m == 1:  # a single row with gaps is a column-major matrix
        row_stride = n * item if column_stride == item else item
    by_row = column_stride == item and row_stride >= n * item
    by_column = row_stride == item and column_stride >= m * item
    if not (by_row or by_column) or row_stride % item or column_stride % item:
        return None
    return as_strided(
        array,
        (*array.shape[:lead], m, n),
        (*array.strides[:lead], row_stride, column_stride),
    )


def _collapse(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """Merge axes to one (size, stride) if their strides allow, else return None."""
    size, stride = 1, 0
    for n, s in zip(reversed(shape), reversed(strides), strict=True):
        if n == 1:
            continue
        if size == 1:
            stride = s
        elif s != stride * size:
            return None
        size *= n
    return size, stride


def even_shares(share: int, most: int) -> int:
    """Return the elements, at most `most`, of tiles that divide a share evenly."""
    return -(-share // -(-share // most)) if share else 0


class Tiling:
    """(samples, *outputs) cut into blocks of about `target` elements, in memory order.

    A block is whole along its last axes, partial along one, single along the first.
    Blocks are computed on access: a list of thousands would take memory too.
    """

    def __init__(self, batch: int, shape: Sequence[int], target: int) -> None:
        self._sizes = (batch, *shape)
        blocks, room = [], max(1, target)
        for size in reversed(self._sizes):
            count = -(-size // max(1, room))
            blocks.append(-(-size // count))
            room //= size
        self.largest = tuple(reversed(blocks))
        self.pixels = math.prod(blocks)  # of the largest block
        self._counts = tuple(
            -(-size // block)
            for size, block in zip(self._sizes, self.largest, strict=True)
        )

    def __len__(self) -> int:
        return math.prod(self._counts)

    def __iter__(self) -> Iterator[Cut]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Cut:
        places = map(int, np.unravel_index(index, self._counts))
        samples, *tile = (
            slice(at * block, min((at + 1) * block, size))
            for at, block, size in zip(places, self.largest, self._sizes, strict=True)
        )
        return samples, tuple(tile)


# Patches of a tensor copied into a matrix: the lowering of the GEMM algorithms.
#
# Buffers follow the layout. Channels first keeps pixels contiguous (rows of channel and
# tap, columns of pixels), channels last keeps channels contiguous (rows of pixels,
# columns of tap and channel). Both are passed on as the same logical matrix (groups,
# reduction, pixels), which BLAS takes in either order.


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
        # If no tap leaves the image, patches are read from it without a padded copy.
        inside = all(
            axis.reads(0, axis.outs).start >= 0
            and axis.reads(0, axis.outs).stop <= size
            for axis, size in zip(axes, spatial, strict=True)
        )
        padded = 0 if inside else samples * channels * math.prod(reach)
        # A 1×1 convolution is its own matrix, unless samples separate channels.
        own_matrix = pointwise(axes, spatial) and (channels_last or samples == 1)
        columns = 0 if own_matrix else channels * taps * pixels
        self.regions: list[Region] = [((padded,), dtype), ((columns,), dtype)]

    def lower(self, source: Any, tile: Sequence[slice], buffers: Sequence[Any]) -> Any:
        """Return the patches of `source` (samples, groups, channels, *spatial).

        `tile` has explicit bounds; `buffers` are arrays of `regions`, overwritten.

        Returns: A matrix (groups, reduction, pixels); reduction is (channel, *tap) or,
            channels last, (*tap, channel); pixels are (sample, *output).
        """
        axes, rank = self._axes, len(self._axes)
        spans = zip(axes, tile, strict=True)
        reads = [axis.reads(t.start, t.stop) for axis, t in spans]
        have, want = overlap(reads, source.shape[-rank:])
        offset, last = [0] * rank, self._last
        if any(
            part.stop - part.start < len(r) for part, r in zip(have, reads, strict=True)
        ):
            # Windows reach into the padding: read them from a zero-padded copy.
            lengths = [len(r) for r in reads]
            copy = padded_buffer(buffers[0], source.shape, lengths, channels_last=last)
            copy[...] = 0
            np.copyto(copy[(..., *want)], source[(..., *have)])
            source, offset = copy, [-r.start for r in reads]
        windows = tap_windows(source, axes, tile, offset)
        taps = tuple(range(3, 3 + rank))
        outs = tuple(range(3 + rank, 3 + 2 * rank))
        reduction = (*taps, 2) if last else (2, *taps)
        ordered = windows.transpose(1, *reduction, 0, *outs)
        return packed(ordered, 1 + rank, buffers[1], by_column=last)


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

    `rows` axes of `shape` after the first belong to the rows. `by_column` stores
    matrices column by column.
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
