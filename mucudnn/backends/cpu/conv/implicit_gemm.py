"""IMPLICIT_GEMM: a matrix product whose patches are gathered as it goes, in blocks.

No workspace: three blocks of a few kilobytes (patches, filter, result) are all there
is. The price is products too small for BLAS to be at its best, on one thread: several
would spend their time handing the interpreter lock to each other.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mucudnn.backends.cpu.conv.algorithm import Algorithm
from mucudnn.backends.cpu.conv.lowering.gather import (
    Axis,
    Cut,
    Gather,
    Tiling,
    as_matrix,
    backward_gathers,
    forward_gather,
    grouped,
    read_windows,
)
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["ALGORITHM"]

_PIXEL_BYTES = 224  # one row of a block of patches
_TERMS = 54  # its rows: groups × channels × taps
_ROWS = 28  # rows of a block of the result
_PADDED_BYTES = 6 << 10  # what a block of patches reads; all together take 30 KiB

_Reach = tuple[slice, slice] | None
"""Outputs (within a tile) that a tap reaches, and what it reads for them."""


class ImplicitGemm:
    """The products of one problem, gather by gather.

    Args:
        problem: In any direction.
        workers: However many; most of it is done by one.
    """

    nbytes = 0

    def __init__(self, problem: ConvProblem, workers: int) -> None:
        self._problem = problem
        gathers = [forward_gather(problem)]
        if problem.direction is Direction.BACKWARD_DATA:
            gathers = list(backward_gathers(problem))
        self._gathers = gathers
        self._by_pixel = problem.direction is Direction.FORWARD and not (
            math.prod(problem.w_shape[2:]) > 1
            or any(problem.padding)
            or any(step > 1 for step in problem.stride)
        )

    def run(
        self,
        a: Any,
        b: Any,
        out: Any,
        workspace: Any,
        workers: Workers,
        accumulate: bool,
    ) -> None:
        """Write (or add) the result; see `Kernel`."""
        problem, groups = self._problem, self._problem.groups
        if problem.direction is Direction.BACKWARD_FILTER:
            dw = grouped(out, groups, 0)
            if not accumulate:
                dw[...] = 0
            x, dy = grouped(a, groups, 1), grouped(b, groups, 1)
            _Blocked(problem, self._gathers[0]).filter_gradient(x, dy, dw, workers)
            return
        source, dest = grouped(a, groups, 1), grouped(out, groups, 1)
        w = grouped(b, groups, 0)
        if not accumulate:
            if self._by_pixel and _multiply_pixels(source, w, dest, workers):
                return
            dest[...] = 0
        if problem.direction is Direction.BACKWARD_DATA:
            w = w.swapaxes(1, 2)
        for gather in self._gathers:
            filters, target = w[(..., *gather.taps)], dest[(..., *gather.outs)]
            _Blocked(problem, gather).correlate(source, filters, target, workers)


ALGORITHM = Algorithm("IMPLICIT_GEMM", ImplicitGemm)


def _multiply_pixels(x: Any, w: Any, y: Any, workers: Workers) -> bool:
    """Multiply by x itself, where a patch is a pixel; False where strides forbid it."""
    rank = x.ndim - 3
    inputs, outputs = as_matrix(x, 1, rank), as_matrix(y, 1, rank)
    filters = as_matrix(w, 1, 1 + rank)
    if inputs is None or outputs is None or filters is None:
        return False

    def work(worker: int, n: int) -> None:
        np.matmul(filters, inputs[n], out=outputs[n])

    workers.each(range(x.shape[0]), work)
    return True


@dataclass(frozen=True, slots=True)
class _Terms:
    """A block of the reduction: a contiguous range of filter columns.

    Attributes:
        groups: Groups it is of.
        channels: Channels of each.
        taps: Flattened taps of each.
        columns: Where they lie in a filter's rows.
    """

    groups: slice
    channels: slice
    taps: range
    columns: slice


class _Blocked:
    """The loops over blocks, for one gather."""

    def __init__(self, problem: ConvProblem, gather: Gather) -> None:
        self._gather = gather
        self._last = problem.layout == "NHWC"
        pixels = _PIXEL_BYTES // problem.itemsize
        outs = math.prod(gather.out_shape)
        self._tiling = Tiling(problem.batch, gather.out_shape, min(pixels, outs))
        self._columns = np.empty(_TERMS * pixels, problem.dtype)
        self._products = np.empty(_ROWS * max(_TERMS, pixels), problem.dtype)
        self._filters = np.empty(_ROWS * max(_TERMS, pixels), problem.dtype)
        self._padded = np.empty(_PADDED_BYTES // problem.itemsize, problem.dtype)

    def correlate(self, source: Any, w: Any, dest: Any, workers: Workers) -> None:
        """Add w (G, D, C, *taps) @ patches of (N, G, C, …) to dest (N, G, D, *outs)."""
        rank = len(self._gather.axes)
        taps = tuple(range(3, 3 + rank))
        ordered = w.transpose(0, 1, *((*taps, 2) if self._last else (2, *taps)))
        matrix = as_matrix(ordered, 1, 1 + rank)

        def work(worker: int, cut: Cut) -> None:
            samples, tile = cut
            sample = source[samples.start]
            for terms in self._blocks(*source.shape[1:3]):
                columns = self._lower(sample, terms, tile)
                groups, _, pixels = columns.shape
                block = self._filters_of(w, terms) if matrix is None else None
                for rows in _cuts(w.shape[1], max(1, _ROWS // groups)):
                    if block is None:
                        filters = matrix[terms.groups, rows, terms.columns]
                    else:
                        filters = self._packed(block[:, rows])
                    shape = (groups, filters.shape[1], pixels)
                    product = _front(self._products, shape)
                    np.matmul(filters, columns, out=product)
                    target = dest[(samples.start, terms.groups, rows, *tile)]
                    np.add(target, product.reshape(target.shape), out=target)

        workers.each(self._tiling, work, at_most=1)

    def filter_gradient(self, x: Any, dy: Any, dw: Any, workers: Workers) -> None:
        """Add dy (N, G, K, …) @ patchesᵀ, over all tiles, to dw (G, K, C, *taps)."""
        rank = len(self._gather.axes)
        dw = dw.reshape(*dw.shape[:3], self._gather.num_taps)

        def work(worker: int, terms: _Terms) -> None:
            for samples, tile in self._tiling:
                columns = self._lower(x[samples.start], terms, tile)
                groups, count, pixels = columns.shape
                for rows in _cuts(dy.shape[2], max(1, _ROWS // groups)):
                    part = dy[(samples.start, terms.groups, rows, *tile)]
                    errors = as_matrix(part, 1, rank)
                    if errors is None:
                        shape = (*part.shape[:2], pixels)
                        errors = _front(self._filters, shape)
                        np.copyto(errors.reshape(part.shape), part)
                    shape = (groups, part.shape[1], count)
                    product = _front(self._products, shape)
                    np.matmul(errors, columns.transpose(0, 2, 1), out=product)
                    target = dw[terms.groups, rows, terms.channels, _slice(terms.taps)]
                    np.add(target, self._by_channel(product, target), out=target)

        blocks = self._blocks(*x.shape[1:3])
        workers.each(blocks, work, at_most=1)

    def _blocks(self, groups: int, channels: int) -> Iterator[_Terms]:
        """Contiguous ranges of (channel, tap), or of (tap, channel) channels last."""
        taps = self._gather.num_taps
        per_tap = min(channels, _TERMS) if self._last else 1
        some_taps = self._tap_chunk(_TERMS // per_tap)
        some_channels = max(1, _TERMS // (some_taps if self._last else taps))
        some_groups = min(_ROWS, max(1, _TERMS // (channels * taps)))
        for g in _cuts(groups, some_groups):
            for c in _cuts(channels, some_channels):
                for t in _cuts(taps, some_taps):
                    if self._last:
                        start = t.start * channels + c.start
                        stop = (t.stop - 1) * channels + c.stop
                    else:
                        start = c.start * taps + t.start
                        stop = (c.stop - 1) * taps + t.stop
                    yield _Terms(g, c, range(t.start, t.stop), slice(start, stop))

    def _tap_chunk(self, limit: int) -> int:
        """At most `limit` taps such that every chunk of them is a box of the kernel."""
        size = 1
        for i, axis in reversed(list(enumerate(self._gather.axes))):
            if size * axis.taps > limit:
                most = limit // size
                if i > 0:  # a chunk must not run into the next row
                    most = max(m for m in range(1, most + 1) if axis.taps % m == 0)
                return size * most
            size *= axis.taps
        return size

    def _lower(self, source: Any, terms: _Terms, tile: Any) -> Any:
        """Patches of one sample (G, C, *spatial) as (groups, terms, pixels)."""
        part = source[terms.groups, terms.channels]
        groups, channels = part.shape[:2]
        outs = [t.stop - t.start for t in tile]
        count = len(terms.taps)
        shape = (count, channels) if self._last else (channels, count)
        columns = _front(self._columns, (groups, *shape, *outs))
        by_channel = columns.swapaxes(1, 2) if self._last else columns
        box = [
            replace(
                axis,
                start=axis.start + taps.start * axis.tap_step,
                taps=taps.stop - taps.start,
            )
            for axis, taps in zip(self._gather.axes, self._box(terms.taps), strict=True)
        ]
        windows = read_windows(
            part, box, tile, lambda spatial: self._room((groups, channels, *spatial))
        )
        if windows is None:
            self._lower_by_tap(part, terms.taps, tile, by_channel)
        else:
            strides = by_channel.strides
            steps = [strides[2]]
            for axis in reversed(box[1:]):
                steps.insert(0, steps[0] * axis.taps)
            target = as_strided(
                by_channel, windows.shape, (*strides[:2], *steps, *strides[3:])
            )
            np.copyto(target, windows)
        return columns.reshape(groups, channels * count, math.prod(outs))

    def _room(self, shape: Sequence[int]) -> Any:
        """The buffer for padded patches in this shape; None if it is too small."""
        if math.prod(shape) > self._padded.size:
            return None
        return _front(self._padded, shape)

    def _lower_by_tap(self, part: Any, taps: range, tile: Any, columns: Any) -> None:
        """Fill columns (groups, channels, taps, *outs); what no tap reaches is 0."""
        columns[...] = 0
        sizes = part.shape[2:]
        for i, tap in enumerate(taps):
            along = zip(self._gather.axes, self._unravel(tap), tile, sizes, strict=True)
            reaches = [_reach(axis, j, t, size) for axis, j, t, size in along]
            hit = [r for r in reaches if r is not None]
            if len(hit) == len(reaches):
                target = columns[(slice(None), slice(None), i, *(r[0] for r in hit))]
                np.copyto(target, part[(..., *(r[1] for r in hit))])

    def _box(self, taps: range) -> list[slice]:
        """These taps along each kernel axis; see `_tap_chunk`."""
        first, last = self._unravel(taps[0]), self._unravel(taps[-1])
        return [slice(a, b + 1) for a, b in zip(first, last, strict=True)]

    def _filters_of(self, w: Any, terms: _Terms) -> Any:
        """Filters (G, D, C, *taps) of a block, as (groups, D, terms in their order)."""
        part = w[(terms.groups, slice(None), terms.channels, *self._box(terms.taps))]
        if self._last:
            return part.transpose(0, 1, *range(3, part.ndim), 2)
        return part

    def _packed(self, filters: Any) -> Any:
        """A copy (groups, rows, terms) that BLAS can take."""
        copy = _front(self._filters, filters.shape)
        np.copyto(copy, filters)
        return copy.reshape(*filters.shape[:2], math.prod(filters.shape[2:]))

    def _by_channel(self, product: Any, target: Any) -> Any:
        """A block of a filter gradient (groups, rows, terms) as (…, channels, taps)."""
        lead, (channels, taps) = product.shape[:2], target.shape[2:]
        if self._last:
            return product.reshape(*lead, taps, channels).swapaxes(2, 3)
        return product.reshape(*lead, channels, taps)

    def _unravel(self, tap: int) -> tuple[int, ...]:
        index = []
        for axis in reversed(self._gather.axes):
            tap, j = divmod(tap, axis.taps)
            index.append(j)
        return tuple(reversed(index))


def _reach(axis: Axis, tap: int, outs: slice, size: int) -> _Reach:
    low, high = axis.inside(tap, size, outs.start, outs.stop)
    if low == high:
        return None
    at, step = axis.start + tap * axis.tap_step, axis.out_step
    read = slice(at + low * step, at + (high - 1) * step + 1, step)
    return slice(low - outs.start, high - outs.start), read


def _cuts(total: int, block: int) -> Iterator[slice]:
    for start in range(0, total, block):
        yield slice(start, min(start + block, total))


def _front(buffer: Any, shape: Sequence[int]) -> Any:
    return buffer[: math.prod(shape)].reshape(shape)


def _slice(taps: range) -> slice:
    return slice(taps.start, taps.stop)
