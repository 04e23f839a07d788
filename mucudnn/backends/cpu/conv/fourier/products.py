"""Products of spectra, one block of frequencies at a time.

The filter's spectrum, usually the largest of the three, is never whole in memory. A
filter has few taps, so a block of its frequencies is one matrix product with the DFT of
the single taps (the basis). It is computed (or, for the filter gradient, consumed) just
when its block is multiplied, while it is in the cache.

A complex product is done as real ones. Real and imaginary parts of all samples are the
rows of one matrix, which turns the four real products into two, with their sums
afterwards. BLAS runs this as fast as its complex product, and planar storage saves the
transforms from interleaving. A filter gradient sums over the rows, so there [re; im]
times [im; -re] gives the imaginary part directly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv.carve import Region, carve
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["Products"]

_BLOCK_BYTES = 1 << 20  # bytes of a block's arrays; about a core's second-level cache
_LEAST = 16  # frequencies of a block; the product with the basis is slow with fewer
_ROWS = 256  # samples and tiles whose products are summed while they are in the cache
_PIECE = 16  # output channels of the filter that are copied at a time


@dataclass(frozen=True, slots=True)
class Products:
    """The multiplication of the spectra of one problem.

    Spectra of x and y are (frequencies, 2, rows, channels); the basis is (frequencies,
    2, taps).

    Attributes:
        problem: The convolution.
        frequencies: Number of frequencies of a spectrum.
        rows: Samples times tiles.
    """

    problem: ConvProblem
    frequencies: int
    rows: int

    @property
    def _weights(self) -> int:
        return math.prod(self.problem.w_shape[:2])

    @property
    def _taps(self) -> int:
        return math.prod(self.problem.w_shape[2:])

    @property
    def _channels_last(self) -> bool:
        """Whether the filter is stored with its taps before its channels."""
        return self.problem.layout == "NHWC" and self.problem.w_shape[1] > 1

    @property
    def _block(self) -> int:
        fit = _BLOCK_BYTES // (
            sum(map(math.prod, self._arrays(1))) * self.problem.itemsize
        )
        return min(max(fit, _LEAST), self.frequencies)

    def _arrays(self, block: int) -> list[tuple[int, ...]]:
        """Return the shapes of the filter's spectrum and of the products of a block."""
        p = self.problem
        if p.direction is Direction.BACKWARD_FILTER:
            other: tuple[int, ...] = (block, 2, self.rows, p.x_shape[1])
        else:
            forward = p.direction is Direction.FORWARD
            channels = p.w_shape[0] if forward else p.x_shape[1]
            other = (block, 4 * min(self.rows, _ROWS) * channels)
        return [(block, 2, self._weights), other]

    def _blocks(self) -> range:
        return range(0, self.frequencies, self._block)

    def _slice(self, start: int) -> slice:
        return slice(start, min(start + self._block, self.frequencies))

    def basis(self) -> Region:
        """Region of the DFT of every tap."""
        return (self.frequencies, 2, self._taps), self.problem.dtype

    def filter(self, nworkers: int) -> Region:
        """Return the region of the reordered filter or of the workers' gradients."""
        if self.problem.direction is Direction.BACKWARD_FILTER:
            return (nworkers, self._weights * self._taps), self.problem.dtype
        return (self._taps, self._weights), self.problem.dtype

    def scratch(self) -> list[Region]:
        """Return the regions of a worker's arrays for one block."""
        shapes = self._arrays(self._block)
        if self.problem.direction is Direction.BACKWARD_FILTER:
            shapes += [(self._weights, self._taps)]
        return [(shape, self.problem.dtype) for shape in shapes]

    def apply(
        self,
        workers: Workers,
        basis: Any,
        source: Any,
        result: Any,
        w: Any,
        taps: Any,
        scratch: Any,
    ) -> None:
        """Compute Y = X conj(W), or X = Y W for dx; `w` is stored densely."""
        self._gather(workers, w, taps)

        def work(worker: int, start: int) -> None:
            spectrum, products = carve(scratch[worker], self.scratch())
            block = self._slice(start)
            part = spectrum[: block.stop - start]
            rows = basis[block].reshape(-1, self._taps)
            np.matmul(rows, taps, out=part.reshape(-1, self._weights))
            for row in range(0, self.rows, _ROWS):
                at = (block, slice(None), slice(row, row + _ROWS))
                self._multiply(source[at], part, result[at], products.reshape(-1))

        workers.each(self._blocks(), work)

    def _gather(self, workers: Workers, w: Any, taps: Any) -> None:
        """Copy a filter to (taps, groups, channels summed over, other channels).

        BLAS takes the right-hand matrix of a product much faster if its rows are
        contiguous, and copying the taps is cheaper than copying their spectra.
        """
        groups, (K, C) = self.problem.groups, self.problem.w_shape[:2]
        K //= groups
        if self._channels_last:
            w = w.reshape(groups, K, self._taps, C).transpose(2, 0, 3, 1)
        else:
            w = w.reshape(groups, K, C, self._taps).transpose(3, 0, 2, 1)
        if self.problem.direction is Direction.FORWARD:
            out = taps.reshape(self._taps, groups, C, K)
        else:
            out = taps.reshape(self._taps, groups, K, C).swapaxes(2, 3)
        pieces = -(-K // _PIECE)

        def work(_: int, item: int) -> None:
            group, piece = divmod(item, pieces)
            at = (..., group, slice(None), slice(piece * _PIECE, (piece + 1) * _PIECE))
            np.copyto(out[at], w[at])

        workers.each(range(groups * pieces), work)

    def _multiply(self, source: Any, spectrum: Any, result: Any, products: Any) -> None:
        groups, channels = self.problem.groups, source.shape[-1]
        count, _, rows, _ = source.shape
        # Real and imaginary rows are adjacent only if all rows are taken.
        parts, height = (1, 2 * rows) if rows == self.rows else (2, rows)
        left = source.reshape(count, 1, parts, height, groups, -1)
        products = products[: 4 * count * rows * result.shape[-1]]
        np.matmul(
            left.swapaxes(3, 4),
            spectrum.reshape(count, 2, 1, groups, channels // groups, -1),
            out=products.reshape(count, 2, parts, height, groups, -1).swapaxes(3, 4),
        )
        # Axes 1 and 2: real or imaginary part of the filter, and of the source.
        by = products.reshape(count, 2, 2, rows, -1)
        if self.problem.direction is Direction.FORWARD:
            np.add(by[:, 0, 0], by[:, 1, 1], out=result[:, 0])
            np.subtract(by[:, 0, 1], by[:, 1, 0], out=result[:, 1])
        else:
            np.subtract(by[:, 0, 0], by[:, 1, 1], out=result[:, 0])
            np.add(by[:, 0, 1], by[:, 1, 0], out=result[:, 1])

    def gradient(
        self, workers: Workers, basis: Any, xs: Any, ys: Any, sums: Any, scratch: Any
    ) -> None:
        """Compute W = X conj(Y), transformed back, as one partial sum per worker.

        The fixed assignment of blocks to workers makes the result deterministic.
        """
        blocks = self._blocks()
        sums[...] = 0

        def work(worker: int, start: int, stop: int) -> None:
            spectrum, rotated, share = carve(scratch[worker], self.scratch())
            for first in blocks[start:stop]:
                block = self._slice(first)
                count = block.stop - first
                arrays = spectrum[:count], rotated[:count], share
                self._correlate(basis[block], xs[block], ys[block], arrays)
                np.add(sums[worker], share.reshape(-1), out=sums[worker])

        workers.ranges(len(blocks), work)

    def _correlate(self, basis: Any, x: Any, y: Any, arrays: Sequence[Any]) -> None:
        spectrum, rotated, share = arrays
        groups, (K, C) = self.problem.groups, self.problem.w_shape[:2]
        count = len(x)
        np.copyto(rotated[:, 0], x[:, 1])
        np.negative(x[:, 0], out=rotated[:, 1])
        left = y.reshape(count, -1, groups, K // groups).transpose(0, 2, 3, 1)
        for part, right in enumerate((x, rotated)):
            np.matmul(
                left,
                right.reshape(count, -1, groups, C).swapaxes(1, 2),
                out=spectrum[:, part].reshape(count, groups, K // groups, C),
            )
        rows = basis.reshape(-1, self._taps)
        if self._channels_last:
            right = spectrum.reshape(-1, K, C).swapaxes(0, 1)
            np.matmul(rows.T, right, out=share.reshape(K, self._taps, C))
        else:
            left = spectrum.reshape(-1, self._weights).T
            np.matmul(left, rows, out=share)
