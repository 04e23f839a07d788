"""GEMM, IMPLICIT_GEMM and IMPLICIT_PRECOMP_GEMM in all three directions.

All patches of the micro-batch are written to the workspace, which grows with it, and
multiplied at once. This gives the largest products where images are small.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mucudnn.backends.cpu.conv.algorithm import (
    ALIGNMENT,
    Algorithm,
    Arrays,
    Kernel,
    Region,
    carve,
    nbytes,
)
from mucudnn.backends.cpu.conv.blockwise import Blockwise
from mucudnn.backends.cpu.conv.im2col import (
    Cut,
    Gather,
    Patches,
    Tiling,
    as_matrix,
    backward_gathers,
    even_shares,
    forward_gather,
    grouped,
    matrix_buffer,
    multiply,
    overlap,
    packed,
    padded_buffer,
    tap_windows,
)
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction


def _gemm_kernel(problem: ConvProblem, workers: int) -> Kernel:
    match problem.direction:
        case Direction.FORWARD:
            return Correlation(problem, workers, math.inf)
        case Direction.BACKWARD_DATA:
            return Scattering(problem, workers, math.inf)
        case Direction.BACKWARD_FILTER:
            return FilterGradient(problem, workers, math.inf)


GEMM = Algorithm("GEMM", _gemm_kernel)

# IMPLICIT_GEMM: matrix products of patches that are gathered in small blocks.
#
# The algorithm has no workspace. What a kernel may allocate anyway (see `Kernel`) holds
# one small block, for a single thread: two blocks of half the size would take nearly
# twice the time of a whole one, as BLAS packs the filter for each.
#
# Where the samples of the result are independent, more memory is available: the last
# few samples, which are written last, hold large blocks for every worker until then.
# Results that are accumulated have only the small block, and so have filter gradients,
# which are sums over samples. Where a pixel is its own patch no block is needed, and
# all workers take part.

_SMALL = 32 << 10  # bytes of a block and its padding, if they are allocated
_SCATTERED = 24 << 10  # bytes of one that is scattered, whose views take the rest
_LARGE = 256 << 10  # bytes per worker, if the block lies in the result
_PART = 2  # at most every second remaining sample holds blocks


class ImplicitGemm:
    """The products of one problem, in any direction, by a number of workers."""

    nbytes = 0

    def __init__(self, problem: ConvProblem, workers: int) -> None:
        self._problem = problem
        self._item = problem.itemsize
        small = _SCATTERED if problem.direction is Direction.BACKWARD_DATA else _SMALL
        self._small = Blockwise(problem, small // self._item)
        self._crew = workers if self._small.needs_no_room else 1
        forward = problem.direction is Direction.FORWARD
        result = problem.y_shape if forward else problem.x_shape
        self._sample = math.prod(result[1:]) * self._item
        self._levels = list(self._planned(workers))

    def run(
        self, arrays: Arrays, workspace: Any, workers: Workers, accumulate: bool
    ) -> None:
        """See `Kernel.run`."""
        a, b, out = arrays
        if not self._problem.batch:
            if not accumulate:
                out[...] = 0
            return
        first = 0
        for last, spare, blocks in [] if accumulate else self._levels:
            n, room = slice(first, last), out[last : last + spare]
            buffers = self._within(room, blocks.room, workers.count)
            blocks.run(a[n], b, out[n], buffers, workers, accumulate)
            first = last
        # No later samples can hold blocks for the last ones: use the small block.
        size = 0 if self._small.needs_no_room else self._small.room
        buffers = [np.empty(size, out.dtype)] * self._crew
        self._small.run(a[first:], b, out[first:], buffers, workers, accumulate)

    def _planned(self, workers: int) -> Iterator[tuple[int, int, Blockwise]]:
        """Yield (end of samples, samples beyond it that hold blocks, blocks)."""
        sums = self._problem.direction is Direction.BACKWARD_FILTER
        if sums or self._small.needs_no_room or not self._sample:
            return
        left = self._problem.batch
        wanted = -(-(workers * _LARGE + ALIGNMENT) // self._sample)
        while spare := min(wanted, left // _PART):
            share = (spare * self._sample - ALIGNMENT) // workers
            room = min(_LARGE, share // ALIGNMENT * ALIGNMENT)
            if room < _SMALL:
                return
            blocks = Blockwise(self._problem, room // self._item)
            yield self._problem.batch - spare, spare, blocks
            left = spare

    def _within(self, spare: Any, room: int, workers: int) -> list[Any]:
        """Return each worker's buffer within densely packed samples."""
        start = -spare.__array_interface__["data"][0] % ALIGNMENT // self._item
        flat = as_strided(spare, (spare.size,), (self._item,))[start:]
        return [flat[i * room : (i + 1) * room] for i in range(workers)]


IMPLICIT_GEMM = Algorithm("IMPLICIT_GEMM", ImplicitGemm)

# IMPLICIT_PRECOMP_GEMM: patches of one tile at a time, at precomputed offsets.
#
# The offsets of a tile's patches are computed once, as strides of a small padded copy
# of the tile's input. The patches are copied into a buffer that stays in cache and are
# multiplied at once. Workspace does not grow with the batch.

_TILE_BYTES = 2 << 20  # of patches: short calls cost more than cache misses
_FEW_CHANNELS = 16  # rows below which a product does not fill the vector units


def _precomp_gemm_kernel(problem: ConvProblem, workers: int) -> Kernel:
    if problem.direction is Direction.BACKWARD_FILTER:
        return FilterGradient(problem, workers, _TILE_BYTES)
    # Patches of dx are scattered rather than patches of dy gathered where the products
    # are small: with a stride, gathering takes one per residue class of positions, with
    # short rows. If patches do not overlap, these are all the work there is.
    _, channels, *kernel = problem.w_shape
    overlapping = math.prod(kernel) > math.prod(problem.stride) > 1
    scatters = problem.groups == 1 and (channels < _FEW_CHANNELS or overlapping)
    if problem.direction is Direction.BACKWARD_DATA and scatters:
        return Scattering(problem, workers, _TILE_BYTES)
    return Correlation(problem, workers, _TILE_BYTES)


IMPLICIT_PRECOMP_GEMM = Algorithm("IMPLICIT_PRECOMP_GEMM", _precomp_gemm_kernel)

# Forward and backward data as matrix products over gathered patches.
#
# Backward data is a correlation of dy with transposed filters, one for each residue
# class of input positions when the stride is greater than 1.

_LEAST_PIXELS = 256  # below this, BLAS spends its time packing the filter


@dataclass(frozen=True)
class _Part:
    """A gather and its tiles."""

    gather: Gather
    tiling: Tiling
    patches: Patches


class Correlation:
    """A kernel that lowers, multiplies and writes one independent tile at a time.

    About `tile_bytes` of patches are lowered at a time; if infinite, all of them.
    """

    def __init__(self, problem: ConvProblem, workers: int, tile_bytes: float) -> None:
        self._tile_bytes = tile_bytes
        self._forward = problem.direction is Direction.FORWARD
        self._groups = problem.groups
        self._last = problem.layout == "NHWC"
        self._rank = len(problem.stride)
        # A gradient of data has a gather for each phase of the strides.
        source, dest = problem.x_shape, problem.y_shape
        gathers = [forward_gather(problem)]
        if not self._forward:
            source, dest = dest, source
            gathers = list(backward_gathers(problem))
        self._covered = sum(math.prod(g.out_shape) for g in gathers)
        self._outputs = math.prod(dest[2:])
        self._parts = [self._part(problem, g, source, workers) for g in gathers]
        transposed = not self._forward and math.prod(problem.w_shape[2:]) > 1
        weights = math.prod(problem.w_shape) if transposed else 0
        # There is no part at all if every output sees nothing but padding.
        pixels = max((part.tiling.pixels for part in self._parts), default=0)
        self._crew = workers
        dtype = problem.dtype
        # Parts run in turn in the same buffers, as large as any of them needs.
        self._own: list[Region] = [
            *map(max, zip(*(p.patches.regions for p in self._parts), strict=True)),
            ((dest[1] * pixels,), dtype),
        ]
        self.regions: list[Region] = [((weights,), dtype), *self._own * workers]
        self.nbytes = nbytes(self.regions)

    def _part(
        self, problem: ConvProblem, gather: Gather, source: Sequence[int], workers: int
    ) -> _Part:
        reduction = source[1] * gather.num_taps
        share = -(-problem.batch * math.prod(gather.out_shape) // workers)
        fits = self._tile_bytes / (reduction * problem.itemsize)
        most = int(max(_LEAST_PIXELS, min(share, fits)))
        target = even_shares(share, most)
        tiling = Tiling(problem.batch, gather.out_shape, target)
        samples, *tile = tiling.largest
        patches = Patches(
            gather.axes, source[2:], source[1], samples, tile, self._last, problem.dtype
        )
        return _Part(gather, tiling, patches)

    def run(
        self, arrays: Arrays, workspace: Any, workers: Workers, accumulate: bool
    ) -> None:
        """See `Kernel.run`."""
        source, w, dest = arrays
        weights, *buffers = carve(workspace, self.regions)
        source = grouped(source, self._groups, 1)
        dest = grouped(dest, self._groups, 1)
        # No part writes inputs that are out of reach of every tap.
        if self._covered < self._outputs and not accumulate:
            dest[...] = 0
        each, w_axes = len(self._own), range(3, 3 + self._rank)
        rows, channel = (1, 2) if self._forward else (2, 1)
        order = (*w_axes, channel) if self._last else (channel, *w_axes)

        def run_part(part: _Part) -> None:
            # The filter as (groups, outputs, reduction), in the order of the patches.
            taps = grouped(w[(..., *part.gather.taps)], self._groups, 0)
            taps = taps.transpose(0, rows, *order)
            matrix = packed(taps, 1, weights, by_column=False)
            target = dest[(..., *part.gather.outs)]

            def work(worker: int, cut: Cut) -> None:
                own = buffers[worker * each : (worker + 1) * each]
                samples, tile = cut
                columns = part.patches.lower(source[samples], tile, own)
                out = target[(samples, ..., *tile)]
                out, last = out.transpose(1, 2, 0, *range(3, out.ndim)), self._last
                room, add = own[-1], accumulate
                multiply(matrix, columns, out, room, by_column=last, accumulate=add)

            workers.each(part.tiling, work)

        for part in self._parts:
            run_part(part)


# A filter gradient as a matrix product: dW = sum over tiles of dy @ patchesᵀ.


_LEAST_TERMS = 512  # least pixels that one product sums over
_LARGE_FILTER = 1 << 17  # elements; above, private sums cost more than they save


class FilterGradient:
    """A sum of products over tiles, in an order that does not depend on threads.

    If the filter is small, every worker sums its own share of the tiles; if it is
    large, every worker sums all tiles for its own share of the channels.

    About `tile_bytes` of patches are lowered at a time; if infinite, all of them.
    """

    def __init__(self, problem: ConvProblem, workers: int, tile_bytes: float) -> None:
        self._groups = problem.groups
        self._last = problem.layout == "NHWC"
        self._rank = len(problem.stride)
        self._gather = forward_gather(problem)
        self._count = workers
        c, k = problem.x_shape[1] // problem.groups, problem.w_shape[0]
        taps = self._gather.num_taps
        pixels = problem.batch * math.prod(self._gather.out_shape)
        # Divide a worker's pixels evenly into tiles with patches of `tile_bytes`.
        per_pixel = problem.x_shape[1] * taps * problem.itemsize
        share = -(-pixels // workers)
        most = int(max(_LEAST_TERMS, min(share, tile_bytes / per_pixel)))
        target = even_shares(share, most)
        self._tiling = Tiling(problem.batch, self._gather.out_shape, target)
        # Workers own channels of a large filter; of a small one each has a private sum.
        self._by_channel = c >= 8 * workers and k * c * taps > _LARGE_FILTER
        self._block = -(-c // (2 * workers)) if self._by_channel else c
        samples, *tile = self._tiling.largest
        axes, sizes = self._gather.axes, problem.x_shape[2:]
        c_most, dtype = self._block * problem.groups, problem.dtype
        self._patches = Patches(axes, sizes, c_most, samples, tile, self._last, dtype)
        self._own: list[Region] = [
            *self._patches.regions,
            ((k * self._tiling.pixels,), dtype),
            ((k * self._block * taps,), dtype),
        ]
        self._sums: list[Region] = (
            [] if self._by_channel else [((k * c * taps,), dtype)] * (workers - 1)
        )
        self.regions: list[Region] = [*self._sums, *self._own * workers]
        self.nbytes = nbytes(self.regions)

    def run(
        self, arrays: Arrays, workspace: Any, workers: Workers, accumulate: bool
    ) -> None:
        """See `Kernel.run`."""
        x, dy, dw = arrays
        carved = carve(workspace, self.regions)
        sums, buffers = carved[: len(self._sums)], carved[len(self._sums) :]
        each = len(self._own)
        x, dy = grouped(x, self._groups, 1), grouped(dy, self._groups, 1)
        dw = grouped(dw, self._groups, 0)

        def own(worker: int) -> list[Any]:
            return buffers[worker * each : (worker + 1) * each]

        everything = range(len(self._tiling))
        # Workers take separate channels where the filter is large,
        if self._by_channel:
            blocks = range(0, x.shape[2], self._block)

            def by_channel(worker: int, start: int) -> None:
                c = slice(start, min(start + self._block, x.shape[2]))
                target = dw[:, :, c]
                self._sum(x[:, :, c], dy, target, everything, own(worker), accumulate)

            workers.each(blocks, by_channel)
            return
        # else separate tiles, each with a sum of its own that is added at the end.
        targets = [dw, *(as_strided(s, dw.shape, dw.strides) for s in sums)]
        share = -(-len(self._tiling) // self._count)
        shares = [
            (target, everything[i * share : (i + 1) * share])
            for i, target in enumerate(targets)
            if i * share < len(everything)
        ]

        def by_tile(worker: int, item: tuple[Any, range]) -> None:
            target, tiles = item
            self._sum(x, dy, target, tiles, own(worker), accumulate and target is dw)

        workers.each(shares, by_tile)
        for target, _ in shares[1:]:
            np.add(dw, target, out=dw)

    def _sum(
        self,
        x: Any,
        dy: Any,
        dw: Any,
        tiles: Sequence[int],
        buffers: Sequence[Any],
        accumulate: bool,
    ) -> None:
        """Add (or, at first, write) the products of some tiles to dw."""
        taps = tuple(range(3, 3 + self._rank))
        ordered = dw.transpose(0, 1, *((*taps, 2) if self._last else (2, *taps)))
        for index in tiles:
            samples, tile = self._tiling[index]
            columns = self._patches.lower(x[samples], tile, buffers).transpose(0, 2, 1)
            part = dy[(samples, ..., *tile)]
            part = part.transpose(1, 2, 0, *range(3, part.ndim))
            errors = packed(part, 1, buffers[2], by_column=self._last)
            room, add = buffers[3], accumulate
            multiply(errors, columns, ordered, room, by_column=False, accumulate=add)
            accumulate = True


# Backward data as a product whose patches are added to the positions they come from.
#
# This is the transpose of lowering (col2im): patches = wᵀ @ dy, then each tap's plane
# is added to a padded dx. The matrices have as many rows as the filter has weights per
# output channel, which suits few input channels and large strides.


class Scattering:
    """A kernel whose items of work are samples, or blocks of channels of one sample.

    About `tile_bytes` of patches are multiplied at a time; if infinite, those of a
    worker's whole share of the samples.
    """

    def __init__(self, problem: ConvProblem, workers: int, tile_bytes: float) -> None:
        self._problem = problem
        self._last = problem.layout == "NHWC"
        self._axes = forward_gather(problem).axes
        self._taps = tuple(axis.taps for axis in self._axes)
        groups, channels = problem.groups, problem.w_shape[1]
        share = -(-problem.batch // workers)
        self._samples = share if tile_bytes == math.inf else 1
        # With fewer samples than workers, each takes a block of channels instead.
        alone = problem.batch < workers and channels >= workers and not self._last
        self._block = -(-channels // workers) if alone else channels
        outs = problem.y_shape[2:]
        rows = groups * self._block * math.prod(self._taps)
        fits = tile_bytes / (rows * problem.itemsize)
        whole = self._samples * math.prod(outs)
        self._tile = int(min(whole, max(_LEAST_PIXELS, fits)))
        tiling = Tiling(self._samples, outs, self._tile)
        # Patches are added to a padded image, in which no tap is out of bounds.
        self._reads = [axis.reads(0, axis.outs) for axis in self._axes]
        padded = self._samples * groups * self._block
        padded *= math.prod(len(r) for r in self._reads)
        dtype = problem.dtype
        self._own: list[Region] = [
            ((padded,), dtype),
            ((rows * tiling.pixels,), dtype),
            ((problem.w_shape[0] * tiling.pixels,), dtype),
        ]
        self.regions: list[Region] = self._own * workers
        self.nbytes = nbytes(self.regions)

    def run(
        self, arrays: Arrays, workspace: Any, workers: Workers, accumulate: bool
    ) -> None:
        """See `Kernel.run`."""
        dy, w, dx = arrays
        buffers = carve(workspace, self.regions)
        each = len(self._own)
        groups = self._problem.groups
        dy, dx = grouped(dy, groups, 1), grouped(dx, groups, 1)
        w = grouped(w, groups, 0)
        items = itertools.product(
            range(0, dx.shape[0], self._samples), range(0, dx.shape[2], self._block)
        )

        def work(worker: int, item: tuple[int, int]) -> None:
            n = slice(item[0], min(item[0] + self._samples, dx.shape[0]))
            c = slice(item[1], min(item[1] + self._block, dx.shape[2]))
            own = buffers[worker * each : (worker + 1) * each]
            self._scatter(dy[n], w[:, :, c], dx[n, :, c], own, accumulate)

        workers.each(items, work)

    def _scatter(
        self, dy: Any, w: Any, dx: Any, buffers: Any, accumulate: bool
    ) -> None:
        rank = len(self._axes)
        lengths = [len(r) for r in self._reads]
        padded = padded_buffer(buffers[0], dx.shape, lengths, channels_last=self._last)
        padded[...] = 0
        offset = [-r.start for r in self._reads]
        for samples, tile in Tiling(dx.shape[0], self._problem.y_shape[2:], self._tile):
            patches = self._patches(w, dy[(samples, ..., *tile)], buffers)
            windows = tap_windows(padded[samples], self._axes, tile, offset)
            for tap in itertools.product(*map(range, self._taps)):
                at = (slice(None),) * 3 + tap
                np.add(windows[at], patches[at], out=windows[at])
        # Return the padded image without its border; pixels out of reach get zeros.
        have, want = overlap(self._reads, dx.shape[3:])
        inner = padded[(..., *want)]
        reached = dx[(..., *have)]
        if accumulate:
            np.add(reached, inner, out=reached)
        else:
            if inner.shape[-rank:] != dx.shape[-rank:]:
                dx[...] = 0
            np.copyto(reached, inner)

    def _patches(self, w: Any, dy: Any, buffers: Any) -> Any:
        """Return wᵀ @ dy as (samples, groups, channels, *taps, *outputs)."""
        rank = len(self._axes)
        taps = tuple(range(3, 3 + rank))
        rows = (*taps, 2) if self._last else (2, *taps)
        filters = w.transpose(0, *rows, 1)
        matrix = as_matrix(filters, 1 + rank, 1)
        ordered = dy.transpose(1, 2, 0, *range(3, dy.ndim))
        errors = packed(ordered, 1, buffers[2], by_column=self._last)
        shape = (*filters.shape[:-1], *ordered.shape[2:])
        patches, product = matrix_buffer(
            buffers[1], shape, 1 + rank, by_column=self._last
        )
        np.matmul(matrix, errors, out=product)
        first, channel = (1, 1 + rank) if self._last else (2, 1)
        sample, kernel = 2 + rank, range(first, first + rank)
        pixels = range(sample + 1, sample + 1 + rank)
        return patches.transpose(sample, 0, channel, *kernel, *pixels)
