"""A filter gradient as a matrix product: dW = sum over tiles of dy @ patchesᵀ."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mucudnn.backends.cpu.conv.carve import Region, carve, nbytes
from mucudnn.backends.cpu.conv.lowering.gather import (
    Tiling,
    even_shares,
    forward_gather,
    grouped,
)
from mucudnn.backends.cpu.conv.lowering.patches import Patches, multiply, packed
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem

__all__ = ["FilterGradient"]

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
        per_pixel = problem.x_shape[1] * taps * problem.itemsize
        share = -(-pixels // workers)
        most = int(max(_LEAST_TERMS, min(share, tile_bytes / per_pixel)))
        target = even_shares(share, most)
        self._tiling = Tiling(problem.batch, self._gather.out_shape, target)
        self._by_channel = c >= 8 * workers and k * c * taps > _LARGE_FILTER
        self._block = -(-c // (2 * workers)) if self._by_channel else c
        samples, *tile = self._tiling.largest
        self._patches = Patches(
            self._gather.axes,
            problem.x_shape[2:],
            self._block * problem.groups,
            samples,
            tile,
            self._last,
            problem.dtype,
        )
        dtype = problem.dtype
        block = k * self._block * taps
        self._own: list[Region] = [
            *self._patches.regions,
            ((k * self._tiling.pixels,), dtype),
            ((block,), dtype),
        ]
        self._sums: list[Region] = (
            [] if self._by_channel else [((k * c * taps,), dtype)] * (workers - 1)
        )
        self.regions: list[Region] = [*self._sums, *self._own * workers]
        self.nbytes = nbytes(self.regions)

    def run(
        self,
        x: Any,
        dy: Any,
        dw: Any,
        workspace: Any,
        workers: Workers,
        accumulate: bool,
    ) -> None:
        """See `Kernel.run`."""
        arrays = carve(workspace, self.regions)
        sums, buffers = arrays[: len(self._sums)], arrays[len(self._sums) :]
        each = len(self._own)
        x, dy = grouped(x, self._groups, 1), grouped(dy, self._groups, 1)
        dw = grouped(dw, self._groups, 0)

        def own(worker: int) -> list[Any]:
            return buffers[worker * each : (worker + 1) * each]

        everything = range(len(self._tiling))
        if self._by_channel:
            blocks = range(0, x.shape[2], self._block)

            def by_channel(worker: int, start: int) -> None:
                c = slice(start, min(start + self._block, x.shape[2]))
                target = dw[:, :, c]
                self._sum(x[:, :, c], dy, target, everything, own(worker), accumulate)

            workers.each(blocks, by_channel)
            return
        targets = [dw, *(as_strided(s, dw.shape, dw.strides) for s in sums)]
        share = -(-len(self._tiling) // self._count)
        shares = [
            (target, everything[i * share : (i + 1) * share])
            for i, target in enumerate(targets)
            if i * share < len(everything)
        ]

        def by_tile(worker: int, item: tuple[Any, range]) -> None:
            target, tiles = item
            add = accumulate and target is dw
            self._sum(x, dy, target, tiles, own(worker), add)

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
            columns = self._patches.lower(x[samples], tile, buffers)
            part = dy[(samples, ..., *tile)]
            part = part.transpose(1, 2, 0, *range(3, part.ndim))
            errors = packed(part, 1, buffers[2], by_column=self._last)
            multiply(
                errors,
                columns.transpose(0, 2, 1),
                ordered,
                buffers[3],
                by_column=False,
                accumulate=accumulate,
            )
            accumulate = True
