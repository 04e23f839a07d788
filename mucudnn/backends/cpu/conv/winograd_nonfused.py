"""Winograd convolution, not fused: transform, batched matrix product, transform back.

With V the transformed tiles of the source, U the transformed filter and Y those of dy,
every value of a tile has its own matrix product: M = V U (forward and, with the filter
flipped and transposed, backward data) or S = Yᵀ V (backward filter). The last is the
adjoint of the first: dw = Gᵀ [sum over tiles of (Bᵀ x B) ⊙ (A dy Aᵀ)] G.
"""

from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv import carve
from mucudnn.backends.cpu.conv.algorithm import Algorithm
from mucudnn.backends.cpu.conv.winograd.filters import (
    Filter,
    filter_region,
    spare_items,
)
from mucudnn.backends.cpu.conv.winograd.plan import (
    Block,
    Piece,
    Plan,
    make_plan,
    pieces,
)
from mucudnn.backends.cpu.conv.winograd.tiles import Tiles
from mucudnn.backends.cpu.conv.winograd.transforms import TAPS
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["ALGORITHM"]


def excluded(problem: ConvProblem) -> str | None:
    """Return a reason unless stride and dilation are 1 and kernel sizes are 3."""
    for name, value, needed in (
        ("kernel", problem.w_shape[2:], TAPS),
        ("stride", problem.stride, 1),
        ("dilation", problem.dilation, 1),
    ):
        if any(v != needed for v in value):
            return f"{name} is {value}, Winograd F(m, 3) needs {needed} on every axis"
    return None


class Winograd:
    """A problem that is not `excluded`, cut into blocks of tiles."""

    def __init__(self, problem: ConvProblem, workers: int) -> None:
        self._problem = problem
        self._plan = make_plan(problem, workers)
        self._regions = _regions(problem, self._plan, workers)
        self.nbytes = carve.nbytes(self._regions)

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
        problem, plan, minimal = self._problem, self._plan, self._plan.minimal
        arrays = carve.carve(workspace, self._regions)
        kernel, inner, outer, spare, even, odd, *bands = arrays
        adjoint = problem.direction is Direction.BACKWARD_FILTER
        half, scratch = len(bands) // 2, (even, odd)
        matrix = minimal.input_matrix()
        source = Tiles(plan, plan.source, a, matrix, inner, bands[:half], scratch)
        matrix, image = minimal.output_matrix(), b if adjoint else out
        result = Tiles(plan, plan.result, image, matrix, outer, bands[half:], scratch)
        w = Filter(problem, minimal, kernel)
        if adjoint:
            sum_gradient = _sum_apart if plan.crew else _sum_together
            sum_gradient(plan, source, result, w, spare, workers)
            w.gradient(out, spare, accumulate, workers)
        else:
            w.transform(b, workers)
            correlate = _correlate_apart if plan.crew else _correlate_together
            correlate(plan, source, result, w, workers, add=accumulate)


ALGORITHM = Algorithm("WINOGRAD_NONFUSED", Winograd, excluded)


Product = tuple[int, slice]
"""A value of the tiles and some rows of its matrix product."""


def _regions(problem: ConvProblem, plan: Plan, nworkers: int) -> list[carve.Region]:
    """List the values of filter, source and result; workers' scratch; band matrices."""
    dtype = problem.dtype
    adjoint = problem.direction is Direction.BACKWARD_FILTER
    rooms = max(1, plan.crew)
    # Each worker has a sum and the next block's summand.
    kernels = 2 * plan.crew if adjoint and plan.crew else 1
    spare = spare_items(problem) if adjoint else 0
    even, odd = plan.scratch_items(adding=not adjoint)
    return [
        filter_region(problem, plan.minimal, kernels),
        ((rooms, plan.block_items(plan.source)), dtype),
        ((rooms, plan.block_items(plan.result)), dtype),
        ((nworkers, spare), dtype),
        ((nworkers, even), dtype),
        ((nworkers, odd), dtype),
        *plan.band_regions(plan.source, dtype),
        *plan.band_regions(plan.result, dtype),
    ]


def _correlate_apart(
    plan: Plan, source: Tiles, result: Tiles, w: Filter, workers: Workers, *, add: bool
) -> None:
    kernel = w.values()

    def work(worker: int, block: Block) -> None:
        for piece in plan.pieces(block):
            source.read(block, piece, worker)
        v, m = (t.values(block, kernel.shape[1], worker) for t in (source, result))
        _product(v, kernel, m)
        for piece in plan.pieces(block):
            result.write(block, piece, worker, add=add)

    workers.each(plan.blocks(), work, at_most=plan.crew)


def _correlate_together(
    plan: Plan, source: Tiles, result: Tiles, w: Filter, workers: Workers, *, add: bool
) -> None:
    kernel = w.values()
    for block in plan.blocks():
        v, m = (t.values(block, kernel.shape[1]) for t in (source, result))

        def read(worker: int, piece: Piece, block: Block = block) -> None:
            source.read(block, piece, worker)

        def multiply(_: int, item: Product, v: Any = v, m: Any = m) -> None:
            value, rows = item
            _product(v[value, :, rows], kernel[value], m[value, :, rows])

        def write(worker: int, piece: Piece, block: Block = block) -> None:
            result.write(block, piece, worker, add=add)

        workers.each(plan.pieces(block), read)
        workers.each(_products(plan, v.shape[2], workers), multiply)
        workers.each(plan.pieces(block), write)


def _sum_apart(
    plan: Plan, x: Tiles, dy: Tiles, dw: Filter, _: Any, workers: Workers
) -> None:
    """Sum the transformed filter's gradient over the tiles, one part per worker.

    The result does not depend on which worker takes a part: sums belong to the part.
    """

    def work(_: int, part: int) -> None:
        own = part
        for block in plan.blocks(part, plan.crew):
            for piece in plan.pieces(block):
                x.read(block, piece, part)
                dy.read(block, piece, part)
            out = dw.values(own)
            v, y = (t.values(block, out.shape[1], part) for t in (x, dy))
            _product(y.swapaxes(2, 3), v, out)
            if own != part:
                dw.add(part, [own])
            own = plan.crew + part

    workers.each(range(plan.crew), work)
    dw.add(0, range(1, plan.crew), workers)


def _sum_together(
    plan: Plan, x: Tiles, dy: Tiles, dw: Filter, spare: Any, workers: Workers
) -> None:
    """Sum the transformed filter's gradient over all tiles, block by block."""
    sums = dw.values()
    for i, block in enumerate(plan.blocks()):
        v, y = (t.values(block, sums.shape[1]) for t in (x, dy))

        def read(worker: int, piece: Piece, block: Block = block) -> None:
            x.read(block, piece, worker)
            dy.read(block, piece, worker)

        def multiply(
            worker: int, item: Product, v: Any = v, y: Any = y, i: int = i
        ) -> None:
            value, rows = item
            out = sums[value, :, rows]
            fresh = out
            if i > 0:
                fresh = spare[worker, : out.size].reshape(out.shape)
            _product(y[value, :, :, rows].swapaxes(1, 2), v[value], fresh)
            if i > 0:
                np.add(out, fresh, out=out)

        workers.each(plan.pieces(block), read)
        workers.each(_products(plan, sums.shape[2], workers), multiply)


def _products(plan: Plan, rows: int, workers: Workers) -> list[Product]:
    parts = min(rows, -(-4 * workers.count // plan.values))
    return [
        (value, slice(start, stop))
        for value in range(plan.values)
        for start, stop in pieces(rows, parts)
    ]


def _product(a: Any, b: Any, out: Any) -> None:
    """Multiply matrices, one pair per group."""
    if a.shape[-1] == 1:
        np.multiply(a, b, out=out)
    else:
        np.matmul(a, b, out=out)
