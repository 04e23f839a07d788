"""IMPLICIT_GEMM: matrix products of patches that are gathered in small blocks.

The algorithm has no workspace. What a kernel may allocate anyway (see `Kernel`) holds
one small block, for a single thread: two blocks of half the size would take nearly
twice the time of a whole one, as BLAS packs the filter for each.

Where the samples of the result are independent, more memory is available: the last few
samples, which are written last, hold large blocks for every worker until then. Results
that are accumulated have only the small block, and so have filter gradients, which are
sums over samples. Where a pixel is its own patch no block is needed, and all workers
take part.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mucudnn.backends.cpu.conv.algorithm import Algorithm
from mucudnn.backends.cpu.conv.carve import ALIGNMENT
from mucudnn.backends.cpu.conv.lowering.blockwise import Blockwise
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["ALGORITHM"]

_SMALL = 32 << 10  # bytes of a block and its padding, if they are allocated
_LARGE = 256 << 10  # bytes per worker, if the block lies in the result
_PART = 2  # at most every second remaining sample holds blocks


class ImplicitGemm:
    """The products of one problem, in any direction, by a number of workers."""

    nbytes = 0

    def __init__(self, problem: ConvProblem, workers: int) -> None:
        self._problem = problem
        self._item = problem.itemsize
        self._small = Blockwise(problem, _SMALL // self._item)
        self._crew = workers if self._small.needs_no_room else 1
        forward = problem.direction is Direction.FORWARD
        result = problem.y_shape if forward else problem.x_shape
        self._sample = math.prod(result[1:]) * self._item
        self._levels = list(self._planned(workers))

    def run(
        self,
        a: Any,
        b: Any,
        out: Any,
        workspace: Any,
        workers: Workers,
        accumulate: bool,
    ) -> None:
        """See `Kernel.run`."""
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


ALGORITHM = Algorithm("IMPLICIT_GEMM", ImplicitGemm)
