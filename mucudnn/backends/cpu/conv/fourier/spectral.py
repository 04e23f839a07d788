"""A convolution in the Fourier domain: transform, multiply by frequency, invert.

With X, W and Y the spectra of input, filter and output, the three kernels are
Y = X conj(W), X = Y W and W = X conj(Y), summed over input channels, output channels or
samples: for every frequency a complex matrix product over channels and samples. Tiles
are further samples. The spectra of x and y for the whole micro-batch are in the
workspace, which therefore grows with the micro-batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv.carve import Region, carve, nbytes
from mucudnn.backends.cpu.conv.fourier.circles import Axis
from mucudnn.backends.cpu.conv.fourier.dft import (
    Window,
    basis_scratch,
    fill_basis,
    fill_table,
    frequencies,
)
from mucudnn.backends.cpu.conv.fourier.products import Products
from mucudnn.backends.cpu.conv.fourier.separable import Chunk, Separable
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["Spectral"]

_Job = tuple[Separable, Sequence[Any], Any, Any]
"""Transform, its tables, spectrum, tensor."""


@dataclass(frozen=True)
class Spectral:
    """A convolution whose spatial axes have been cut into tiles.

    Attributes:
        problem: The convolution.
        workers: Number of threads that share the work.
        axes: Spatial axes, innermost first.
    """

    problem: ConvProblem
    workers: int
    axes: tuple[Axis, ...]

    @cached_property
    def nbytes(self) -> int:
        """Exact workspace in bytes."""
        return nbytes(self._regions)

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
        arrays = carve(workspace, self._regions)
        basis, xs, ys, scratch, *arrays = arrays
        *tables, kernel = arrays
        # Tables depend on shapes only, but are refilled: kernels hold no arrays.
        self._fill_tables(tables)
        self._fill_basis(basis, tables[2::3], scratch.reshape(-1))
        x = (self._x, tables[0::3], xs)
        y = (self._y, tables[1::3], ys)
        flat_x, flat_y = (s.reshape(*s.shape[:2], -1, s.shape[-1]) for s in (xs, ys))
        products = self._products
        match self.problem.direction:
            case Direction.FORWARD:
                _forward(workers, scratch, (*x, a))
                w = self._stored(b)
                products.apply(workers, basis, flat_x, flat_y, w, kernel, scratch)
                _inverse(workers, scratch, (*y, out), accumulate)
            case Direction.BACKWARD_DATA:
                _forward(workers, scratch, (*y, a))
                w = self._stored(b)
                products.apply(workers, basis, flat_y, flat_x, w, kernel, scratch)
                _inverse(workers, scratch, (*x, out), accumulate)
            case Direction.BACKWARD_FILTER:
                _forward(workers, scratch, (*x, a))
                _forward(workers, scratch, (*y, b))
                products.gradient(workers, basis, flat_x, flat_y, kernel, scratch)
                _reduce(workers, kernel, self._stored(out).reshape(-1), accumulate)

    @cached_property
    def _x(self) -> Separable:
        return self._separable(self.problem.x_shape, [axis.x for axis in self.axes])

    @cached_property
    def _y(self) -> Separable:
        return self._separable(self.problem.y_shape, [axis.y for axis in self.axes])

    def _separable(
        self, shape: tuple[int, ...], windows: Sequence[tuple[Window, ...]]
    ) -> Separable:
        return Separable(
            batch=shape[0],
            channels=shape[1],
            lengths=self._lengths,
            sizes=shape[:1:-1],
            windows=tuple(windows),
            channels_last=self.problem.layout == "NHWC",
            dtype=self.problem.dtype,
        )

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(axis.length for axis in self.axes)

    @cached_property
    def _products(self) -> Products:
        tiles = math.prod(len(axis.x) for axis in self.axes)
        count = sum(frequencies(self._lengths))
        return Products(self.problem, count, self.problem.batch * tiles)

    def _stored(self, w: Any) -> Any:
        """Return a filter's view in the order of its memory."""
        return np.moveaxis(w, 1, -1) if self.problem.layout == "NHWC" else w

    def _basis_scratch(self) -> list[Region]:
        p = self.problem
        return basis_scratch(self._lengths, p.w_shape[:1:-1], p.dtype)

    @cached_property
    def _regions(self) -> list[Region]:
        """List basis, spectra, scratch a worker, tables, filter or partial sums."""
        p, products, nworkers = self.problem, self._products, self.workers
        each = max(
            *(nbytes(s.scratch(*s.chunk_shape(nworkers))) for s in (self._x, self._y)),
            nbytes(products.scratch()),
            -(-nbytes(self._basis_scratch()) // (64 * nworkers)) * 64,
        )
        tables = [
            ((axis.length, len(at)), p.dtype)
            for axis in self.axes
            for at in (axis.x_at, axis.y_at, axis.w_at)
        ]
        return [
            products.basis(),
            self._x.spectrum,
            self._y.spectrum,
            ((nworkers, each), "uint8"),
            *tables,
            products.filter(nworkers),
        ]

    def _fill_tables(self, tables: Sequence[Any]) -> None:
        """Fill the tables of x, y and w per axis; inverse ones for the result."""
        direction = self.problem.direction
        for i, axis in enumerate(self.axes):
            back = {"scale": 1 / axis.length, "pair": 2.0 if i == 0 else 1.0}
            x, y, w = tables[3 * i : 3 * i + 3]
            to_x = direction is Direction.BACKWARD_DATA
            fill_table(x, axis.x_at, **(back if to_x else {}))
            to_y = direction is Direction.FORWARD
            fill_table(y, axis.y_at, **(back if to_y else {}))
            fill_table(w, axis.w_at)

    def _fill_basis(self, basis: Any, tables: Sequence[Any], scratch: Any) -> None:
        """Fill the basis, with the factors of the inverse for a filter gradient."""
        fill_basis(basis, tables, carve(scratch, self._basis_scratch()))
        r, _ = frequencies(self._lengths)
        basis[:r, 1] = 0
        if self.problem.direction is Direction.BACKWARD_FILTER:
            basis[:r] *= 1 / math.prod(self._lengths)
            basis[r:] *= 2 / math.prod(self._lengths)


def _forward(workers: Workers, scratch: Any, job: _Job) -> None:
    transform, tables, spectrum, tensor = job

    def work(worker: int, chunk: Chunk) -> None:
        transform.forward(tables, tensor, spectrum, chunk, scratch[worker])

    workers.each(transform.chunks(workers.count), work)


def _inverse(workers: Workers, scratch: Any, job: _Job, accumulate: bool) -> None:
    transform, tables, spectrum, tensor = job

    def work(worker: int, chunk: Chunk) -> None:
        room = scratch[worker]
        transform.inverse(tables, spectrum, tensor, chunk, room, accumulate)

    workers.each(transform.chunks(workers.count), work)


def _reduce(workers: Workers, sums: Any, out: Any, accumulate: bool) -> None:
    def work(_: int, start: int, stop: int) -> None:
        target = out[start:stop]
        if not accumulate:
            target[...] = 0
        for share in sums:
            np.add(target, share[start:stop], out=target)

    workers.ranges(len(out), work)
