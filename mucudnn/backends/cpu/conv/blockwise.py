"""Convolution as matrix products of blocks of patches, in bounded scratch memory.

A block is planned once, as views with an axis of samples, and then filled for one
sample after another, because planning in Python costs as much as copying.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv.im2col import (
    Axis,
    Gather,
    Tiling,
    as_matrix,
    forward_gather,
    grouped,
    matrix_buffer,
    overlap,
    pointwise,
    tap_windows,
)
from mucudnn.backends.cpu.threads import Workers, available, product
from mucudnn.ir.conv import ConvProblem, Direction


@dataclass(frozen=True, slots=True)
class Block:
    """A contiguous range of filter columns.

    Ranges of groups, of channels of each group, of taps along every kernel axis, and of
    columns in a filter's rows.
    """

    groups: slice
    channels: slice
    taps: tuple[slice, ...]
    columns: slice

    @property
    def kernel(self) -> tuple[int, ...]:
        """Number of taps along each axis."""
        return (*map(_length, self.taps),)


class Blocks:
    """Filter columns, (channel, tap) or channels last (tap, channel), cut into blocks.

    A block has up to `limit` columns over all its groups (several if `spanning`) and up
    to `taps_limit` taps. `sizes` are the numbers of groups and of columns for each tap.
    """

    def __init__(
        self,
        gather: Gather,
        sizes: tuple[int, int],
        limit: int,
        *,
        taps_limit: int,
        last: bool,
        spanning: bool,
    ) -> None:
        groups, channels = sizes
        kernel = tuple(axis.taps for axis in gather.axes)
        per_tap = min(channels, limit) if last else 1
        # Channels last, cut taps first: a tap brings all its channels along.
        some = _tap_block(kernel, max(1, min(taps_limit, limit // per_tap)))
        if last and per_tap < channels:
            some = (1,) * len(kernel)
        # Channels first, the columns of some taps are contiguous in one channel only.
        partial = some != kernel and not last
        fits = per_tap if last else 1 if partial else limit // math.prod(some)
        self._channels = list(cuts(channels, max(1, fits)))
        self._taps = list(itertools.product(*map(cuts, kernel, some)))
        # Only blocks with all channels and taps can span groups.
        whole = channels * math.prod(kernel)
        alone = not spanning or len(self._channels) * len(self._taps) > 1
        self.most_groups = 1 if alone else max(1, min(groups, limit // whole))
        self.groups = list(cuts(groups, self.most_groups))
        self._kernel, self._count, self._last = kernel, channels, last

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Return the disjoint ranges of (groups, channels)."""
        return itertools.product(self.groups, self._channels)

    def of_groups(self, groups: slice) -> Iterator[Block]:
        """Yield all blocks of a range of groups."""
        for channels in self._channels:
            yield from self.of_part(groups, channels)

    def of_part(self, groups: slice, channels: slice) -> Iterator[Block]:
        """Yield the blocks of one range of channels, one per box of taps."""
        for taps in self._taps:
            first = self._flat([t.start for t in taps])
            last = self._flat([t.stop - 1 for t in taps])
            if self._last:
                start = first * self._count + channels.start
                stop = last * self._count + channels.stop
            else:
                each = math.prod(self._kernel)
                start = channels.start * each + first
                stop = (channels.stop - 1) * each + last + 1
            yield Block(groups, channels, taps, slice(start, stop))

    @property
    def terms(self) -> int:
        """Columns of the largest block, over all its groups."""
        taps = max(math.prod(map(_length, box)) for box in self._taps)
        channels = max(map(_length, self._channels))
        return self.most_groups * channels * taps

    def _flat(self, tap: Sequence[int]) -> int:
        index = 0
        for size, j in zip(self._kernel, tap, strict=True):
            index = index * size + j
        return index


def _tap_block(kernel: Sequence[int], limit: int) -> tuple[int, ...]:
    """Return the largest box of at most `limit` taps that are contiguous columns."""
    box, room = [], limit
    for size in reversed(kernel):
        box.append(max(1, min(size, room)))
        room = room // size
    return tuple(reversed(box))


class PatchBlock:
    """A block of patches of one tile.

    `source` is (N, G, C, *spatial), `tile` has explicit bounds, and `buffers` are flat:
    for the patches and for a zero-padded copy.
    """

    def __init__(
        self,
        source: Any,
        gather: Gather,
        block: Block,
        tile: Sequence[slice],
        buffers: Sequence[Any],
        *,
        last: bool,
    ) -> None:
        part = source[:, block.groups, block.channels]
        self._steps: list[tuple[Any, Any, Any, Any]] = []
        self._by_tap: tuple[Any, Any, list[Axis], Sequence[slice]] | None = None
        rank = len(gather.axes)
        if pointwise(gather.axes, source.shape[3:]):
            self.matrix = as_matrix(part[(..., *tile)], 1, rank)
            return
        target, matrix = tap_block(buffers[0], block, tile, last=last)
        self.matrix = matrix[None]
        axes = []
        for axis, taps in zip(gather.axes, block.taps, strict=True):
            start = axis.start + taps.start * axis.tap_step
            count = taps.stop - taps.start
            axes.append(Axis(start, axis.out_step, axis.outs, axis.tap_step, count))
        spans = zip(axes, tile, strict=True)
        reads = [axis.reads(t.start, t.stop) for axis, t in spans]
        sizes = part.shape[3:]
        if all(r.start >= 0 and r.stop <= n for r, n in zip(reads, sizes, strict=True)):
            windows = tap_windows(part, axes, tile, (0,) * rank)
            self._steps.append((None, None, target, windows))
            return
        lengths = [len(r) for r in reads]
        room = buffers[1].size // (part.shape[1] * math.prod(lengths))
        if not room:
            target[...] = 0
            self._by_tap = part, target, axes, tile
            return
        # Through a zero-padded copy of as many channels as fit.
        groups, channels = part.shape[1:3]
        have, want = overlap(reads, sizes)
        some = min(room, channels)
        elements = some * groups * math.prod(lengths)
        padded = buffers[1][:elements].reshape(groups, some, *lengths)
        padded[...] = 0  # kept from one sample to the next
        for cut in cuts(channels, some):
            copy = padded[:, : cut.stop - cut.start]
            windows = tap_windows(copy, axes, tile, [-r.start for r in reads])
            inner, inputs = copy[(..., *want)], part[(slice(None), slice(None), cut)]
            self._steps.append((inner, inputs[(..., *have)], target[:, cut], windows))

    def fill(self, n: int) -> None:
        """Gather the patches of sample `n` into the block."""
        for inner, source, target, windows in self._steps:
            if inner is None:
                np.copyto(target, windows[n])
            else:
                np.copyto(inner, source[n])
                np.copyto(target, windows)
        if self._by_tap is None:
            return
        # Tap by tap, where a padded copy would not fit the buffer.
        part, target, axes, tile = self._by_tap
        for tap in itertools.product(*(range(axis.taps) for axis in axes)):
            if (hit := reach(axes, tap, tile, part.shape[3:])) is not None:
                written, read = hit
                np.copyto(target[(..., *tap, *written)], part[(n, ..., *read)])


def reach(
    axes: Sequence[Axis],
    tap: Sequence[int],
    tile: Sequence[slice],
    sizes: Sequence[int],
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the outputs (within a tile) that a tap reaches, and their inputs."""
    outputs, read = [], []
    for axis, j, t, size in zip(axes, tap, tile, sizes, strict=True):
        low, high = axis.inside(j, size, t.start, t.stop)
        if low == high:
            return None
        at, step = axis.start + j * axis.tap_step, axis.out_step
        read.append(slice(at + low * step, at + (high - 1) * step + 1, step))
        outputs.append(slice(low - t.start, high - t.start))
    return tuple(outputs), tuple(read)


def tap_block(
    buffer: Any, block: Block, tile: Sequence[slice], *, last: bool
) -> tuple[Any, Any]:
    """View a buffer as (groups, channels, *taps, *outs) and (groups, terms, pixels)."""
    groups, channels = map(_length, (block.groups, block.channels))
    kernel, outs = block.kernel, map(_length, tile)
    rank = len(kernel)
    terms = (*kernel, channels) if last else (channels, *kernel)
    shape = (groups, *terms, *outs)
    patches, matrix = matrix_buffer(buffer, shape, 1 + rank, by_column=last)
    if last:
        order = (*range(1, 1 + rank), *range(2 + rank, patches.ndim))
        patches = patches.transpose(0, 1 + rank, *order)
    return patches, matrix


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def cuts(total: int, block: int) -> Iterator[slice]:
    """Yield about equal parts, as many as blocks of this size would make."""
    count = -(-total // block)
    size = -(-total // max(1, count))
    for start in range(0, total, max(1, size)):
        yield slice(start, min(start + size, total))


# A convolution as matrix products of blocks, in a buffer of any given size.
#
# A block of patches is gathered, all rows of the filter are multiplied by it at once,
# and the product is added directly to the result: BLAS takes leading dimensions and a
# factor beta, which `mucudnn.backends.cpu.threads` exposes and `np.matmul` does not, so
# no product is stored. Where groups are so narrow that a block spans several, or where
# no such BLAS exists, part of the buffer holds the product, and the filter's rows are
# taken a few at a time.
#
# Backward data is the transpose: a block of the patches of dx is computed in full, then
# each tap's plane of it is added to the positions that the patch was read from.


_PIXELS = 64  # least pixels of a block of patches
_PER_PIXEL = 256  # elements of a larger buffer for each further pixel
_TAPS = 12  # least taps of a scattered block: each tap is one addition
_PER_TAP = 1024  # elements of a larger buffer for each further tap
_SAMPLES = 8  # samples per planned block, while the result stays in cache
_Step = Callable[[int], None]


class Blockwise:
    """The products of one problem, or of some of its samples.

    `room` is the number of elements of a worker's buffer; `needs_no_room` is True if
    none is needed.
    """

    def __init__(self, problem: ConvProblem, room: int) -> None:
        self._problem, self.room = problem, room
        self._gather = forward_gather(problem)
        self._rank = len(problem.stride)
        self._last = problem.layout == "NHWC"
        self._pixelwise = pointwise(self._gather.axes, problem.x_shape[2:])
        outs, groups = self._gather.out_shape, problem.groups
        self._pixels = math.prod(outs)
        pixels = min(max(_PIXELS, room // _PER_PIXEL), self._pixels)
        self._tile = Tiling(1, outs, pixels).pixels
        data = problem.direction is Direction.BACKWARD_DATA
        channels = (problem.w_shape[0] if data else problem.x_shape[1]) // groups
        self._terms = channels * self._gather.num_taps
        narrow = groups > 1 and 4 * self._terms * self._tile <= room
        self._direct = available(problem.dtype) and not narrow

        # Sixths of the buffer for patches, a zero-padded copy and a product.
        shares = (4, 2, 0) if self._direct else (2, 2, 2)
        # 1×1 filters need no buffer if BLAS accumulates.
        self.needs_no_room = self._direct and self._pixelwise
        sixth = 0 if self.needs_no_room else room // 6
        self._sizes = [share * sixth for share in shares]

    def run(
        self,
        a: Any,
        b: Any,
        out: Any,
        buffers: Sequence[Any],
        workers: Workers,
        accumulate: bool,
    ) -> None:
        """Write (or add) the result; see `Kernel.run`.

        `buffers` are flat arrays of `room` elements, one per participating worker.
        """
        direction, groups = self._problem.direction, self._problem.groups
        one = grouped(a, groups, 1)
        if direction is Direction.BACKWARD_FILTER:
            if not accumulate:
                out[...] = 0
            dy, dw = grouped(b, groups, 1), self._filters(out)
            self._sum_filters(one, dy, dw, buffers, workers)
            return
        dest, filters = grouped(out, groups, 1), self._filters(b)
        if direction is Direction.BACKWARD_DATA and not self._pixelwise:
            if not accumulate:
                out[...] = 0
            self._scatter(one, filters, dest, buffers, workers)
            return
        # With 1×1 filters nothing overlaps: dx is a product like the result.
        if direction is Direction.BACKWARD_DATA:
            filters = filters.transpose(0, 2, 1)
        self._correlate(one, filters, dest, buffers, workers, accumulate)

    def _filters(self, w: Any) -> Any:
        """Return filters, or their gradients, as a view (groups, outputs, terms)."""
        w = grouped(w, self._problem.groups, 0)
        taps = tuple(range(3, 3 + self._rank))
        ordered = w.transpose(0, 1, *((*taps, 2) if self._last else (2, *taps)))
        return as_matrix(ordered, 1, 1 + self._rank)

    def _correlate(
        self,
        source: Any,
        w: Any,
        dest: Any,
        buffers: Sequence[Any],
        workers: Workers,
        accumulate: bool,
    ) -> None:
        """Write (or add) w (G, D, terms) @ patches of (N, G, C, …) to (N, G, D, …)."""
        (blocks, tiling), gather, last = self._cut(source), self._gather, self._last
        # An item of work: some samples of a tile, and some rows if these are too few.
        batch, crew = source.shape[0], len(buffers)
        samples = list(cuts(batch, min(_SAMPLES, -(-batch // crew))))
        enough = len(samples) * len(tiling) >= crew
        rows = list(cuts(w.shape[1], w.shape[1] if enough else -(-w.shape[1] // crew)))

        def work(worker: int, item: tuple[slice, int, slice]) -> None:
            n, index, d = item
            _, tile = tiling[index]
            own = self._parts(buffers[worker])
            for groups in blocks.groups:
                out = as_matrix(dest[(n, groups, d, *tile)], 1, self._rank)
                add = accumulate
                for block in blocks.of_groups(groups):
                    patches = PatchBlock(source[n], gather, block, tile, own, last=last)
                    filters = w[None, groups, d, block.columns]
                    step = _adding(filters, patches.matrix, out, own[2], add)
                    for i in range(out.shape[0]):
                        patches.fill(i)
                        step(i)
                    # Further blocks of these groups add to what the first has written.
                    add = True

        items = itertools.product(samples, range(len(tiling)), rows)
        workers.each(items, work, at_most=crew)

    def _sum_filters(
        self, x: Any, dy: Any, dw: Any, buffers: Sequence[Any], workers: Workers
    ) -> None:
        """Add dy (N, G, K, …) @ patchesᵀ, over all tiles, to dw (G, K, terms)."""
        (blocks, tiling), gather, last = self._cut(x), self._gather, self._last
        # A worker owns its columns of dw: rows are divided, too, if blocks are too few.
        every = [b for groups in blocks.groups for b in blocks.of_groups(groups)]
        rows = list(cuts(dw.shape[1], -(-dw.shape[1] // len(buffers))))
        if len(every) >= len(buffers):
            rows = [slice(0, dw.shape[1])]

        def work(worker: int, item: tuple[Block, slice]) -> None:
            block, k = item
            own = self._parts(buffers[worker])
            target = dw[None, block.groups, k, block.columns]
            for _, tile in tiling:
                errors = as_matrix(
                    dy[(slice(None), block.groups, k, *tile)], 1, self._rank
                )
                patches = PatchBlock(x, gather, block, tile, own, last=last)
                across = patches.matrix.transpose(0, 1, 3, 2)
                step = _adding(errors, across, target, own[2], True)
                for i in range(x.shape[0]):
                    patches.fill(i)
                    step(i)

        workers.each(itertools.product(every, rows), work, at_most=len(buffers))

    def _scatter(
        self, dy: Any, w: Any, dx: Any, buffers: Sequence[Any], workers: Workers
    ) -> None:
        """Add wᵀ @ dy, as patches (G, terms, …) of dx, to their positions."""
        limit, taps = max(1, self.room // self._tile), max(_TAPS, self.room // _PER_TAP)
        sizes, last = dx.shape[1:3], self._last
        blocks = Blocks(
            self._gather, sizes, limit, taps_limit=taps, last=last, spanning=True
        )
        pixels = min(self._pixels, self.room // blocks.terms)
        tiling = Tiling(1, self._gather.out_shape, pixels)
        # Items write disjoint samples and channels: taps of a channel overlap in dx.
        samples = cuts(dx.shape[0], _SAMPLES)

        def work(worker: int, item: tuple[slice, tuple[slice, slice]]) -> None:
            n, part = item
            for block in blocks.of_part(*part):
                filters = w[block.groups, :, block.columns].transpose(0, 2, 1)
                for _, tile in tiling:
                    errors = as_matrix(
                        dy[(n, block.groups, slice(None), *tile)], 1, self._rank
                    )
                    planes, matrix = tap_block(
                        buffers[worker], block, tile, last=self._last
                    )
                    adds = self._additions(dx[n], block, tile, planes)
                    for i in range(errors.shape[0]):
                        np.matmul(filters, errors[i], out=matrix)
                        for target, plane in adds:
                            np.add(target[i], plane, out=target[i])
                    adds.clear()  # else these views live while the next are made

        items = itertools.product(samples, blocks.parts())
        workers.each(items, work, at_most=len(buffers))

    def _cut(self, source: Any) -> tuple[Blocks, Tiling]:
        """Return the blocks of filter columns and the tiles of the result."""
        size, pixels = self._sizes[0], self._pixels
        limit = max(1, size // self._tile) if size else self._terms
        sizes, last, several = source.shape[1:3], self._last, not self._direct
        blocks = Blocks(
            self._gather, sizes, limit, taps_limit=limit, last=last, spanning=several
        )
        if size:
            pixels = max(1, min(pixels, size // blocks.terms))
        return blocks, Tiling(1, self._gather.out_shape, pixels)

    def _parts(self, buffer: Any) -> list[Any]:
        starts = itertools.accumulate(self._sizes, initial=0)
        return [buffer[start:stop] for start, stop in itertools.pairwise(starts)]

    def _additions(
        self, dx: Any, block: Block, tile: Sequence[slice], planes: Any
    ) -> list[tuple[Any, Any]]:
        """List (target in dx, plane) for each tap that reaches dx (N, G, C, …)."""
        axes, part = self._gather.axes, dx[:, block.groups, block.channels]
        adds = []
        for own in itertools.product(*map(range, block.kernel)):
            tap = [t.start + j for t, j in zip(block.taps, own, strict=True)]
            if (hit := reach(axes, tap, tile, part.shape[3:])) is not None:
                written, read = hit
                adds.append((part[(..., *read)], planes[(..., *own, *written)]))
        return adds


def _adding(a: Any, b: Any, out: Any, buffer: Any, add: bool) -> _Step:
    """Return a function that writes (or adds) the product of one sample.

    `a` is (N, G, m, k) or one for all samples, `b` (N, G, k, n), `out` (N, G, m, n);
    `buffer` holds a product that BLAS cannot add.
    """
    # BLAS is called with plain addresses: arrays for each sample would take longer.
    multiply = product(a[0, 0], b[0, 0], out[0, 0]) if out.shape[1] == 1 else None
    if multiply is not None:
        (one, step), (two, hop), (three, leap) = map(_addresses, (a, b, out))
        beta = float(add)
        return lambda i: multiply(one + i * step, two + i * hop, three + i * leap, beta)

    def work(i: int) -> None:
        left, right, target = (x[i if len(x) > 1 else 0] for x in (a, b, out))
        if not add:
            np.matmul(left, right, out=target)
            return
        groups, rows, columns = target.shape
        # Products that cannot be added by BLAS take a detour through the buffer.
        for some in cuts(rows, max(1, buffer.size // (groups * columns))):
            shape = (groups, some.stop - some.start, columns)
            result = buffer[: math.prod(shape)].reshape(shape)
            np.matmul(left[:, some], right, out=result)
            np.add(target[:, some], result, out=target[:, some])

    return work


def _addresses(array: Any) -> tuple[int, int]:
    start: int = array.__array_interface__["data"][0]
    return start, array.strides[0] if len(array) > 1 else 0
