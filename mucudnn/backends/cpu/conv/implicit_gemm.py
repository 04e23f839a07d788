"""IMPLICIT_GEMM: a matrix product whose patches are gathered as it goes, in blocks.

No workspace. Each worker holds three blocks of a few kilobytes (patches, filter and
result) on its own account; the price is products too small for BLAS to be at its best.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv.algorithm import Algorithm
from mucudnn.backends.cpu.conv.gather import (
    Cut,
    Gather,
    Tiling,
    as_matrix,
    backward_gathers,
    forward_gather,
    grouped,
)
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["ALGORITHM"]

_CREW = 2  # workers at most, so that all their blocks together stay under 32 KiB
_PIXEL_BYTES = 224  # one row of a block of patches
_TERMS = 27  # its rows: groups × channels × taps
_ROWS = 24  # rows of a block of the result

_Reach = tuple[slice, slice] | None
"""Outputs (within a tile) that a tap reaches, and what it reads for them."""


def _excluded(problem: ConvProblem) -> str | None:
    return None


def _workspace(problem: ConvProblem, workers: int) -> int:
    return 0


def _run(
    problem: ConvProblem,
    a: Any,
    b: Any,
    out: Any,
    workspace: Any,
    workers: Workers,
    accumulate: bool,
) -> None:
    groups = problem.groups
    if problem.direction is Direction.BACKWARD_FILTER:
        dw = grouped(out, groups, 0)
        if not accumulate:
            dw[...] = 0
        blocked = _Blocked(problem, forward_gather(problem))
        blocked.filter_gradient(
            grouped(a, groups, 1), grouped(b, groups, 1), dw, workers
        )
        return
    source, dest = grouped(a, groups, 1), grouped(out, groups, 1)
    w = grouped(b, groups, 0)
    if problem.direction is Direction.FORWARD:
        if not accumulate and _multiply_pixels(problem, source, w, dest, workers):
            return
        gathers = iter([forward_gather(problem)])
    else:
        w = w.swapaxes(1, 2)
        gathers = backward_gathers(problem)
    if not accumulate:
        dest[...] = 0
    for gather in gathers:
        filters, target = w[(..., *gather.taps)], dest[(..., *gather.outs)]
        _Blocked(problem, gather).correlate(source, filters, target, workers)


ALGORITHM = Algorithm("IMPLICIT_GEMM", _excluded, _workspace, _run)


def _multiply_pixels(
    problem: ConvProblem, x: Any, w: Any, y: Any, workers: Workers
) -> bool:
    """Multiply by x itself where a patch is a pixel; False where it is not."""
    if (
        math.prod(problem.w_shape[2:]) > 1
        or any(problem.padding)
        or any(step > 1 for step in problem.stride)
    ):
        return False
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
    """A block of the reduction: some groups, channels and (flattened) taps."""

    groups: slice
    channels: slice
    taps: range

    @property
    def count(self) -> int:
        """Rows of one group's patches."""
        channels: int = self.channels.stop - self.channels.start
        return channels * len(self.taps)


class _Blocked:
    """The loops over blocks, for one gather."""

    def __init__(self, problem: ConvProblem, gather: Gather) -> None:
        self._gather = gather
        self._last = problem.layout == "NHWC"
        pixels = _PIXEL_BYTES // problem.itemsize
        outs = math.prod(gather.out_shape)
        self._tiling = Tiling(problem.batch, gather.out_shape, min(pixels, outs))
        self._columns, self._products = (
            np.empty((_CREW, _TERMS * pixels), problem.dtype) for _ in range(2)
        )
        self._filters = np.empty((_CREW, _TERMS * _ROWS), problem.dtype)

    def correlate(self, source: Any, w: Any, dest: Any, workers: Workers) -> None:
        """Add w (G, D, C, *taps) @ patches of (N, G, C, …) to dest (N, G, D, *outs)."""

        def work(worker: int, cut: Cut) -> None:
            samples, tile = cut
            sample, reaches = source[samples.start], self._reaches(source, tile)
            for terms in self._blocks(*source.shape[1:3]):
                columns = self._lower(worker, sample, terms, tile, reaches)
                groups = columns.shape[0]
                for rows in _cuts(w.shape[1], max(1, _ROWS // groups)):
                    filters = self._filter(worker, w[terms.groups, rows], terms)
                    shape = (groups, filters.shape[1], columns.shape[2])
                    product = _front(self._products[worker], shape)
                    np.matmul(filters, columns, out=product)
                    target = dest[(samples.start, terms.groups, rows, *tile)]
                    np.add(target, product.reshape(target.shape), out=target)

        workers.each(self._tiling, work, at_most=_CREW)

    def filter_gradient(self, x: Any, dy: Any, dw: Any, workers: Workers) -> None:
        """Add dy (N, G, K, …) @ patchesᵀ, over all tiles, to dw (G, K, C, *taps)."""
        rank = len(self._gather.axes)
        dw = dw.reshape(*dw.shape[:3], self._gather.num_taps)

        def work(worker: int, terms: _Terms) -> None:
            for samples, tile in self._tiling:
                reaches = self._reaches(x, tile)
                columns = self._lower(worker, x[samples.start], terms, tile, reaches)
                groups, pixels = columns.shape[0], columns.shape[2]
                for rows in _cuts(dy.shape[2], max(1, _ROWS // groups)):
                    part = dy[(samples.start, terms.groups, rows, *tile)]
                    errors = as_matrix(part, 1, rank)
                    if errors is None:
                        errors = _front(
                            self._filters[worker], (*part.shape[:2], pixels)
                        )
                        np.copyto(errors.reshape(part.shape), part)
                    shape = (groups, part.shape[1], terms.count)
                    product = _front(self._products[worker], shape)
                    np.matmul(errors, columns.transpose(0, 2, 1), out=product)
                    target = dw[terms.groups, rows, terms.channels, _slice(terms.taps)]
                    np.add(target, self._by_channel(product, target), out=target)

        blocks = self._blocks(*x.shape[1:3])
        workers.each(blocks, work, at_most=_CREW)

    def _blocks(self, groups: int, channels: int) -> Iterator[_Terms]:
        taps = self._gather.num_taps
        several = max(1, _TERMS // (channels * taps))
        block = max(1, _TERMS // taps)
        for g in _cuts(groups, several):
            for c in _cuts(channels, block):
                for t in _cuts(taps, _TERMS):
                    yield _Terms(g, c, range(t.start, t.stop))

    def _reaches(self, source: Any, tile: Any) -> list[list[_Reach]]:
        """For each axis and each tap along it, which outputs of a tile it reaches."""
        result = []
        for axis, t, size in zip(
            self._gather.axes, tile, source.shape[3:], strict=True
        ):
            reaches: list[_Reach] = []
            for j in range(axis.taps):
                low, high = axis.inside(j, size, t.start, t.stop)
                at, step = axis.start + j * axis.tap_step, axis.out_step
                inner = slice(low - t.start, high - t.start)
                read = slice(at + low * step, at + (high - 1) * step + 1, step)
                reaches.append((inner, read) if low < high else None)
            result.append(reaches)
        return result

    def _lower(
        self,
        worker: int,
        source: Any,
        terms: _Terms,
        tile: Any,
        reaches: list[list[_Reach]],
    ) -> Any:
        """Patches of one sample (G, C, *spatial) as (groups, terms, pixels)."""
        part = source[terms.groups, terms.channels]
        outs = tuple(t.stop - t.start for t in tile)
        order = self._order(part.shape[1], len(terms.taps))
        columns = _front(self._columns[worker], (part.shape[0], *order, *outs))
        if any(
            r is None or r[0].stop - r[0].start < out
            for along, out in zip(reaches, outs, strict=True)
            for r in along
        ):
            columns[...] = 0
        for i, tap in enumerate(terms.taps):
            window = [
                along[j] for along, j in zip(reaches, self._unravel(tap), strict=True)
            ]
            hit = [r for r in window if r is not None]
            if len(hit) == len(window):
                at = (slice(None), i) if self._last else (slice(None), slice(None), i)
                target = columns[(*at, ..., *(inner for inner, _ in hit))]
                np.copyto(target, part[(..., *(read for _, read in hit))])
        return columns.reshape(part.shape[0], terms.count, math.prod(outs))

    def _filter(self, worker: int, w: Any, terms: _Terms) -> Any:
        """A block of filters (G, D, C, *taps) as (groups, rows, terms)."""
        part = w[:, :, terms.channels]
        channels = part.shape[2]
        if len(terms.taps) == self._gather.num_taps:
            rank = len(self._gather.axes)
            order = (*range(3, 3 + rank), 2) if self._last else (2, *range(3, 3 + rank))
            matrix = as_matrix(part.transpose(0, 1, *order), 1, 1 + rank)
            if matrix is not None:
                return matrix
        shape = (*part.shape[:2], *self._order(channels, len(terms.taps)))
        copy = _front(self._filters[worker], shape)
        for i, tap in enumerate(terms.taps):
            target = copy[:, :, i] if self._last else copy[..., i]
            np.copyto(target, part[(..., *self._unravel(tap))])
        return copy.reshape(*part.shape[:2], terms.count)

    def _by_channel(self, product: Any, target: Any) -> Any:
        """A block of a filter gradient (groups, rows, terms) as (…, channels, taps)."""
        lead, (channels, taps) = product.shape[:2], target.shape[2:]
        if self._last:
            return product.reshape(*lead, taps, channels).swapaxes(2, 3)
        return product.reshape(*lead, channels, taps)

    def _order(self, channels: int, taps: int) -> tuple[int, int]:
        return (taps, channels) if self._last else (channels, taps)

    def _unravel(self, tap: int) -> tuple[int, ...]:
        index = []
        for axis in reversed(self._gather.axes):
            tap, j = divmod(tap, axis.taps)
            index.append(j)
        return tuple(reversed(index))


def _cuts(total: int, block: int) -> Iterator[slice]:
    for start in range(0, total, block):
        yield slice(start, min(start + block, total))


def _front(buffer: Any, shape: tuple[int, ...]) -> Any:
    return buffer[: math.prod(shape)].reshape(shape)


def _slice(taps: range) -> slice:
    return slice(taps.start, taps.stop)
