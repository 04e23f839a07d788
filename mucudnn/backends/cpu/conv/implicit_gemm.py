"""IMPLICIT_GEMM: matrix products whose patches are gathered as it goes, in blocks.

No workspace: what a kernel may allocate anyway holds one block of patches. All
rows of the filter are multiplied by it at once, and the product is added where the
result lies: BLAS takes leading dimensions and a factor for what is there, which
`mucudnn.backends.cpu.blas` offers and `np.matmul` does not, so no product is kept.
Where groups are so narrow that a block spans several, or where there is no such BLAS,
part of the room is the product's, and the filter's rows are taken a few at a time.

Backward data goes the other way: a block of the patches of dx is multiplied in full,
then each tap's plane of it is added where the patch was read.

One thread: two blocks of half the room would take over twice the time of a whole one,
as BLAS packs the filter for each. Only where a pixel is its own patch, and no block is
needed, do all workers take part.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mucudnn.backends.cpu.blas import available, product
from mucudnn.backends.cpu.conv.algorithm import Algorithm
from mucudnn.backends.cpu.conv.lowering.blocks import (
    Block,
    Blocks,
    PatchBlock,
    cuts,
    pointwise,
    reach,
    tap_block,
)
from mucudnn.backends.cpu.conv.lowering.gather import (
    Tiling,
    as_matrix,
    forward_gather,
    grouped,
)
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["ALGORITHM"]

_ROOM = 32 << 10  # bytes of a block and what belongs to it
_PIXELS = 64  # of a block of patches, about
_TAPS = 12  # of a block that is scattered: each is an addition of its own
_SAMPLES = 8  # that one plan of a block serves, while the result stays in cache

_Step = Callable[[int], None]


class ImplicitGemm:
    """The products of one problem.

    Args:
        problem: In any direction.
        workers: However many; most of it is done by one.
    """

    nbytes = 0

    def __init__(self, problem: ConvProblem, workers: int) -> None:
        self._problem = problem
        self._gather = forward_gather(problem)
        self._rank = len(problem.stride)
        self._last = problem.layout == "NHWC"
        self._pixelwise = pointwise(self._gather, problem.x_shape[2:])
        self._room = _ROOM // problem.itemsize
        outs, groups = self._gather.out_shape, problem.groups
        self._pixels = math.prod(outs)
        self._tile = Tiling(1, outs, min(_PIXELS, self._pixels)).pixels
        data = problem.direction is Direction.BACKWARD_DATA
        channels = (problem.w_shape[0] if data else problem.x_shape[1]) // groups
        self._terms = channels * self._gather.num_taps
        narrow = groups > 1 and 4 * self._terms * self._tile <= self._room
        self._direct = available(problem.dtype) and not narrow
        self._crew = workers if self._direct and self._pixelwise else 1

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
        groups = self._problem.groups
        one = grouped(a, groups, 1)
        if not self._problem.batch:
            if not accumulate:
                out[...] = 0
            return
        match self._problem.direction:
            case Direction.FORWARD:
                dest, filters = grouped(out, groups, 1), self._filters(b)
                self._correlate(one, filters, dest, workers, accumulate)
            case Direction.BACKWARD_FILTER:
                if not accumulate:
                    out[...] = 0
                dy, dw = grouped(b, groups, 1), self._filters(out)
                self._sum_filters(one, dy, dw, workers)
            case Direction.BACKWARD_DATA if self._pixelwise:
                dest = grouped(out, groups, 1)
                filters = self._filters(b).transpose(0, 2, 1)
                self._correlate(one, filters, dest, workers, accumulate)
            case Direction.BACKWARD_DATA:
                if not accumulate:
                    out[...] = 0
                self._scatter(one, self._filters(b), grouped(out, groups, 1), workers)

    def _filters(self, w: Any) -> Any:
        """Filters, or their gradients, as a view (groups, outputs, terms)."""
        w = grouped(w, self._problem.groups, 0)
        taps = tuple(range(3, 3 + self._rank))
        ordered = w.transpose(0, 1, *((*taps, 2) if self._last else (2, *taps)))
        return as_matrix(ordered, 1, 1 + self._rank)

    def _correlate(
        self, source: Any, w: Any, dest: Any, workers: Workers, accumulate: bool
    ) -> None:
        """Write (or add) w (G, D, terms) @ patches of (N, G, C, …) to (N, G, D, …)."""
        blocks, tiling, buffers = self._cut(source)
        samples, rows = self._shares(source.shape[0], len(tiling), w.shape[1])

        def work(worker: int, item: tuple[slice, int, slice]) -> None:
            n, index, d = item
            _, tile = tiling[index]
            for groups in blocks.groups():
                out = as_matrix(dest[(n, groups, d, *tile)], 1, self._rank)
                add = accumulate
                for block in blocks.of_groups(groups):
                    patches = self._patches(source[n], block, tile, buffers)
                    filters = w[None, groups, d, block.columns]
                    step = _adding(filters, patches.matrix, out, buffers[2], add)
                    for i in range(out.shape[0]):
                        patches.fill(i)
                        step(i)
                    add = True

        items = itertools.product(samples, range(len(tiling)), rows)
        workers.each(items, work, at_most=self._crew)

    def _sum_filters(self, x: Any, dy: Any, dw: Any, workers: Workers) -> None:
        """Add dy (N, G, K, …) @ patchesᵀ, over all tiles, to dw (G, K, terms)."""
        blocks, tiling, buffers = self._cut(x)
        every = [b for groups in blocks.groups() for b in blocks.of_groups(groups)]
        rows = list(cuts(dw.shape[1], -(-dw.shape[1] // self._crew)))
        if len(every) >= self._crew:
            rows = [slice(0, dw.shape[1])]

        def work(worker: int, item: tuple[Block, slice]) -> None:
            block, k = item
            target = dw[None, block.groups, k, block.columns]
            for _, tile in tiling:
                errors = as_matrix(
                    dy[(slice(None), block.groups, k, *tile)], 1, self._rank
                )
                patches = self._patches(x, block, tile, buffers)
                across = patches.matrix.transpose(0, 1, 3, 2)
                step = _adding(errors, across, target, buffers[2], True)
                for i in range(x.shape[0]):
                    patches.fill(i)
                    step(i)

        workers.each(itertools.product(every, rows), work, at_most=self._crew)

    def _scatter(self, dy: Any, w: Any, dx: Any, workers: Workers) -> None:
        """Add wᵀ @ dy, as patches (G, terms, …) of dx, where they were read."""
        blocks = Blocks(
            self._gather,
            dx.shape[1],
            dx.shape[2],
            max(1, self._room // self._tile),
            taps_limit=_TAPS,
            last=self._last,
            spanning=True,
        )
        pixels = min(self._pixels, self._room // blocks.terms)
        tiling = Tiling(1, self._gather.out_shape, pixels)
        buffer = np.empty(self._room, dx.dtype)
        samples = cuts(dx.shape[0], _SAMPLES)

        def work(worker: int, item: tuple[slice, tuple[slice, slice]]) -> None:
            n, part = item
            for block in blocks.of_part(*part):
                filters = w[block.groups, :, block.columns].transpose(0, 2, 1)
                for _, tile in tiling:
                    errors = as_matrix(
                        dy[(n, block.groups, slice(None), *tile)], 1, self._rank
                    )
                    planes, matrix = tap_block(buffer, block, tile, last=self._last)
                    adds = self._additions(dx[n], block, tile, planes)
                    for i in range(errors.shape[0]):
                        np.matmul(filters, errors[i], out=matrix)
                        for target, plane in adds:
                            np.add(target[i], plane, out=target[i])

        items = itertools.product(samples, blocks.parts())
        workers.each(items, work, at_most=1)

    def _cut(self, source: Any) -> tuple[Blocks, Tiling, list[Any]]:
        """Blocks of filter columns, tiles, and three buffers.

        They are for patches, for what padding surrounds and for a product.
        """
        shares = (4, 2, 0) if self._direct else (2, 2, 2)
        sizes = [self._room * share // 6 for share in shares]
        limit, pixels = max(1, sizes[0] // self._tile), self._pixels
        if self._direct and self._pixelwise:  # what is read is its patches' matrix
            sizes, limit = [0, 0, 0], self._terms
        blocks = Blocks(
            self._gather,
            source.shape[1],
            source.shape[2],
            limit,
            taps_limit=limit,
            last=self._last,
            spanning=not self._direct,
        )
        if sizes[0]:
            pixels = max(1, min(pixels, sizes[0] // blocks.terms))
        buffers = [np.empty(size, source.dtype) for size in sizes]
        return blocks, Tiling(1, self._gather.out_shape, pixels), buffers

    def _shares(
        self, batch: int, tiles: int, rows: int
    ) -> tuple[list[slice], list[slice]]:
        """Samples, and rows of the result, that are one item of work."""
        samples = list(cuts(batch, min(_SAMPLES, -(-batch // self._crew))))
        enough = len(samples) * tiles >= self._crew
        return samples, list(cuts(rows, rows if enough else -(-rows // self._crew)))

    def _patches(
        self, source: Any, block: Block, tile: Sequence[slice], buffers: Sequence[Any]
    ) -> PatchBlock:
        return PatchBlock(source, self._gather, block, tile, buffers, last=self._last)

    def _additions(
        self, dx: Any, block: Block, tile: Sequence[slice], planes: Any
    ) -> list[tuple[Any, Any]]:
        """What is added to dx (N, G, C, …), and where: planes (G, C, *taps, *outs)."""
        axes, part = self._gather.axes, dx[:, block.groups, block.channels]
        adds = []
        for own in itertools.product(*map(range, block.kernel)):
            tap = [t.start + j for t, j in zip(block.taps, own, strict=True)]
            if (hit := reach(axes, tap, tile, part.shape[3:])) is not None:
                written, read = hit
                adds.append((part[(..., *read)], planes[(..., *own, *written)]))
        return adds


def _adding(a: Any, b: Any, out: Any, buffer: Any, add: bool) -> _Step:
    """What writes (or adds) one sample's product.

    Args:
        a: (N, G, m, k), or one for all samples; so are the others.
        b: (N, G, k, n).
        out: (N, G, m, n).
        buffer: Where a product is kept that BLAS cannot add.
        add: Instead of writing.
    """
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
        for some in cuts(rows, max(1, buffer.size // (groups * columns))):
            shape = (groups, some.stop - some.start, columns)
            result = buffer[: math.prod(shape)].reshape(shape)
            np.matmul(left[:, some], right, out=result)
            np.add(target[:, some], result, out=target[:, some])

    return work


def _addresses(array: Any) -> tuple[int, int]:
    """Where its first sample lies, and bytes from one to the next."""
    start: int = array.__array_interface__["data"][0]
    return start, array.strides[0] if len(array) > 1 else 0


ALGORITHM = Algorithm("IMPLICIT_GEMM", ImplicitGemm)
