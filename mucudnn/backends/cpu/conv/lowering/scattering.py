"""Backward data as a product whose patches are added to the positions they come from.

This is the transpose of lowering (col2im): patches = wᵀ @ dy, then each tap's plane is
added to a padded dx. The matrices have as many rows as the filter has weights per
output channel, which suits few input channels and large strides.
"""

import itertools
import math
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv.carve import Region, carve, nbytes
from mucudnn.backends.cpu.conv.lowering.gather import (
    Tiling,
    as_matrix,
    forward_gather,
    grouped,
    overlap,
    tap_windows,
)
from mucudnn.backends.cpu.conv.lowering.patches import (
    matrix_buffer,
    packed,
    padded_buffer,
)
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem

__all__ = ["Scattering"]

_LEAST_PIXELS = 256  # below this, BLAS spends its time packing the filter


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
        alone = problem.batch < workers and channels >= workers and not self._last
        self._block = -(-channels // workers) if alone else channels
        outs = problem.y_shape[2:]
        rows = groups * self._block * math.prod(self._taps)
        fits = tile_bytes / (rows * problem.itemsize)
        whole = self._samples * math.prod(outs)
        self._tile = int(min(whole, max(_LEAST_PIXELS, fits)))
        tiling = Tiling(self._samples, outs, self._tile)
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
        self,
        dy: Any,
        w: Any,
        dx: Any,
        workspace: Any,
        workers: Workers,
        accumulate: bool,
    ) -> None:
        """See `Kernel.run`."""
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
        outs = self._problem.y_shape[2:]
        for samples, tile in Tiling(dx.shape[0], outs, self._tile):
            errors = dy[(samples, ..., *tile)]
            patches = self._patches(w, errors, buffers)
            windows = tap_windows(padded[samples], self._axes, tile, offset)
            for tap in itertools.product(*map(range, self._taps)):
                at = (slice(None),) * 3 + tap
                np.add(windows[at], patches[at], out=windows[at])
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
        channel = 1 + rank if self._last else 1
        first = 1 if self._last else 2
        sample = 2 + rank
        return patches.transpose(
            sample,
            0,
            channel,
            *range(first, first + rank),
            *range(sample + 1, sample + 1 + rank),
        )
