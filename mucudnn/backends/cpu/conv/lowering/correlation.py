"""Forward and backward data as matrix products over gathered patches.

Backward data is a correlation of dy with transposed filters, one for each residue class
of input positions when the stride is greater than 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.backends.cpu.conv.carve import Region, carve, nbytes
from mucudnn.backends.cpu.conv.lowering.gather import (
    Cut,
    Gather,
    Tiling,
    backward_gathers,
    even_shares,
    forward_gather,
    grouped,
)
from mucudnn.backends.cpu.conv.lowering.patches import Patches, multiply, packed
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["Correlation"]

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
        self,
        source: Any,
        w: Any,
        dest: Any,
        workspace: Any,
        workers: Workers,
        accumulate: bool,
    ) -> None:
        """See `Kernel.run`."""
        weights, *buffers = carve(workspace, self.regions)
        source = grouped(source, self._groups, 1)
        dest = grouped(dest, self._groups, 1)
        if self._covered < self._outputs and not accumulate:
            dest[...] = 0
        each = len(self._own)
        for part in self._parts:
            matrix = self._weights(w, part.gather, weights)
            target = dest[(..., *part.gather.outs)]

            def work(
                worker: int,
                cut: Cut,
                part: _Part = part,
                matrix: Any = matrix,
                target: Any = target,
            ) -> None:
                own = buffers[worker * each : (worker + 1) * each]
                samples, tile = cut
                columns = part.patches.lower(source[samples], tile, own)
                out = target[(samples, ..., *tile)]
                multiply(
                    matrix,
                    columns,
                    out.transpose(1, 2, 0, *range(3, out.ndim)),
                    own[-1],
                    by_column=self._last,
                    accumulate=accumulate,
                )

            workers.each(part.tiling, work)

    def _weights(self, w: Any, gather: Gather, buffer: Any) -> Any:
        """Return (groups, outputs, reduction), in the order of the patches."""
        w = grouped(w[(..., *gather.taps)], self._groups, 0)
        taps = tuple(range(3, 3 + self._rank))
        rows, channel = (1, 2) if self._forward else (2, 1)
        order = (*taps, channel) if self._last else (channel, *taps)
        ordered = w.transpose(0, rows, *order)
        return packed(ordered, 1, buffer, by_column=False)
