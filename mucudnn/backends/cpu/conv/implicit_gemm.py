"""IMPLICIT_GEMM: matrix products whose patches are gathered as it goes, in blocks.

No workspace: what a kernel may allocate anyway (see `Kernel`) holds one small block.
One thread works with it: two blocks of half the room would take nearly twice the time
of a whole one, as BLAS packs the filter for each.

Where each sample of the result stands for itself, there is more room: the last few
samples, which are written last, hold the blocks of all others until then, large ones
for every worker. Results that are added to what is there have the small block only, and
so have filter gradients, which are sums over samples. Where a pixel is its own patch no
block is needed, and all workers take part.
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

_SMALL = 32 << 10  # bytes of a block and what belongs to it, if they are allocated
_LARGE = 256 << 10  # of a worker's, if they are part of the result
_PART = 2  # at most one of so many samples is given up for that


class ImplicitGemm:
    """The products of one problem.

    Args:
        problem: In any direction.
        workers: However many.
    """

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
        """Write (or add) the result; see `Kernel`."""
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
        self._by_small(a[first:], b, out[first:], workers, accumulate)

    def _by_small(
        self, a: Any, b: Any, out: Any, workers: Workers, accumulate: bool
    ) -> None:
        room = 0 if self._small.needs_no_room else self._small.room
        buffers = [np.empty(room, out.dtype)] * self._crew
        self._small.run(a, b, out, buffers, workers, accumulate)

    def _planned(self, workers: int) -> Iterator[tuple[int, int, Blockwise]]:
        """(end of some samples, how many beyond it are their room, how to go)."""
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
        """The room of each worker, in samples that are densely packed."""
        start = -spare.__array_interface__["data"][0] % ALIGNMENT // self._item
        flat = as_strided(spare, (spare.size,), (self._item,))[start:]
        return [flat[i * room : (i + 1) * room] for i in range(workers)]


ALGORITHM = Algorithm("IMPLICIT_GEMM", ImplicitGemm)
