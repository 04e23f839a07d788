"""FFT and FFT_TILING: convolutions in the Fourier domain, whole or in tiles.

The transforms are matrix products (see `dft`), so the length need not be a product of
small primes: 13 x 13 images with a padding of 1 take 14 points, not 16. The cost grows
with the square of the length, which limits the image size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv.algorithm import Algorithm, Arrays, Region, carve, nbytes
from mucudnn.backends.cpu.conv.dft import (
    Chunk,
    ChunkTransform,
    Separable,
    Window,
    basis_scratch,
    fill_basis,
    fill_table,
    frequencies,
)
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction

_LONGEST = 512  # points; beyond, a table outgrows the cache and tiles are faster


def _fft_kernel(problem: ConvProblem, workers: int) -> "Spectral":
    rank = len(problem.stride)
    axes = [whole_axis(problem, i) for i in reversed(range(rank))]
    return Spectral(problem, workers, axes)


def _fft_excluded(problem: ConvProblem) -> str | None:
    for i in range(len(problem.stride)):
        axis = whole_axis(problem, i)
        if axis.length > _LONGEST:
            return (
                f"spatial axis {i} of x {problem.x_shape} needs a transform of "
                f"{axis.length} points, more than {_LONGEST}; FFT_TILING has no limit"
            )
    return None


FFT = Algorithm("FFT", _fft_kernel, _fft_excluded)

# FFT_TILING: images in tiles of 32 x 32 points, whatever their size.
#
# The workspace and the cost of a tile are fixed. Tiles overlap by the filter's span, so
# small filters waste little; a filter that spans a whole tile leaves no output in it.
# Volumes take tiles of 16 points an axis: 32 would need 32 768 a tile.

_TILE = {1: 32, 2: 32, 3: 16}  # points per axis, by the number of spatial axes


def _tiling_kernel(problem: ConvProblem, workers: int) -> "Spectral":
    rank = len(problem.stride)
    axes = [tiled_axis(problem, i, _TILE[rank]) for i in reversed(range(rank))]
    return Spectral(problem, workers, axes)


def _tiling_excluded(problem: ConvProblem) -> str | None:
    tile = _TILE[len(problem.stride)]
    for i, step in enumerate(problem.stride):
        reach = problem.dilation[i] * (problem.w_shape[2 + i] - 1) + 1
        if reach + step - 1 > tile:
            return (
                f"on spatial axis {i} the filter spans {reach} at a stride of {step}, "
                f"too much for tiles of {tile} points"
            )
    return None


FFT_TILING = Algorithm("FFT_TILING", _tiling_kernel, _tiling_excluded)


# Positions of a convolution's samples on the circle of a Fourier transform.
#
# A circular transform of length n computes all three kernels of a convolution exactly
# if no two positions that do not belong together agree modulo n. With x at position j,
# the filter at t and y at m they belong together when j = m + t, so n must exceed the
# greatest |j - m - t| of a tile. It need not cover the padding at both ends.


@dataclass(frozen=True, slots=True)
class Axis:
    """A spatial axis: the length of its transform and its tiles.

    `x` and `y` are the windows of input and output, one per tile. `x_at` and `y_at` are
    the positions of their columns (those of y `stride` apart), `w_at` those of the
    filter's taps, `dilation` apart.
    """

    length: int
    x: tuple[Window, ...]
    y: tuple[Window, ...]
    x_at: range
    y_at: range
    w_at: range


def whole_axis(problem: ConvProblem, axis: int) -> Axis:
    """Return spatial axis number `axis` in one piece, on the shortest exact circle."""
    size, out = problem.x_shape[2 + axis], problem.y_shape[2 + axis]
    step, pad = problem.stride[axis], problem.padding[axis]
    taps = _taps(problem, axis)
    length = max(pad + size, (out - 1) * step - pad + taps[-1] + 1)
    x, y = (Window(0, size, 0),), (Window(0, out, 0),)
    x_at, y_at = range(pad, pad + size), range(0, (out - 1) * step + 1, step)
    return Axis(length, x, y, x_at, y_at, taps)


def tiled_axis(problem: ConvProblem, axis: int, tile: int) -> Axis:
    """Return spatial axis number `axis` in tiles on circles of `tile` points.

    The tiles that the kernel reads overlap, those it writes do not (overlap-save); a
    filter gradient reads tiles of y that do not overlap.
    """
    size, out = problem.x_shape[2 + axis], problem.y_shape[2 + axis]
    step, pad = problem.stride[axis], problem.padding[axis]
    taps = _taps(problem, axis)
    reach = taps[-1] + 1
    if problem.direction is not Direction.BACKWARD_DATA:
        new = (tile - reach) // step + 1
        count = -(-out // new)
        width = (new - 1) * step + reach
        x = (_window(i * new * step - pad, width, size) for i in range(count))
        y = (_window(i * new, new, out) for i in range(count))
        y_at = range(0, width - reach + 1, step)
        return Axis(tile, tuple(x), tuple(y), range(width), y_at, taps)
    new = (tile - reach + 1) // step * step
    count = -(-size // new)
    shift = reach - 1 - pad  # position of output 0 in the first tile
    first = -(shift // step)
    y_at = range(first * step + shift, new + reach - 1, step)
    x = (_window(i * new, new, size) for i in range(count))
    y = (_window(i * new // step + first, len(y_at), out) for i in range(count))
    x_at = range(reach - 1, reach - 1 + new)
    return Axis(tile, tuple(x), tuple(y), x_at, y_at, taps)


def _taps(problem: ConvProblem, axis: int) -> range:
    step = problem.dilation[axis]
    return range(0, step * (problem.w_shape[2 + axis] - 1) + 1, step)


def _window(start: int, width: int, size: int) -> Window:
    """Return the existing part of the positions `start` to `start + width`."""
    low = min(max(start, 0), size)
    high = min(max(start + width, low), size)
    return Window(low, high, max(low - start, 0) if high > low else 0)


# A convolution in the Fourier domain: transform, multiply by frequency, invert.
#
# With X, W and Y the spectra of input, filter and output, the three kernels are Y = X
# conj(W), X = Y W and W = X conj(Y), summed over input channels, output channels or
# samples: for every frequency a complex matrix product over channels and samples. Tiles
# are further samples. The spectra of x and y for the whole micro-batch are in the
# workspace, which therefore grows with the micro-batch.


_Job = tuple[Separable, Sequence[Any], Any]
"""Transform, its tables, spectrum."""


class Spectral:
    """A convolution whose spatial axes, innermost first, have been cut into tiles."""

    def __init__(
        self, problem: ConvProblem, workers: int, axes: Sequence[Axis]
    ) -> None:
        self.problem, self._axes = problem, axes
        self._lengths = tuple(axis.length for axis in axes)
        self._x = self._separable(problem.x_shape, [axis.x for axis in axes])
        self._y = self._separable(problem.y_shape, [axis.y for axis in axes])
        tiles = math.prod(len(axis.x) for axis in axes)
        count = sum(frequencies(self._lengths))
        self._products = Products(problem, count, problem.batch * tiles)
        self._regions = self._list_regions(workers)
        self.nbytes = nbytes(self._regions)

    def run(
        self, arrays: Arrays, workspace: Any, workers: Workers, accumulate: bool
    ) -> None:
        """See `Kernel.run`."""
        a, b, out = arrays
        basis, xs, ys, scratch, *tables, kernel = carve(workspace, self._regions)
        # Tables depend on shapes only, but are refilled: kernels hold no arrays.
        self._fill_tables(tables)
        flat = scratch.reshape(-1)
        fill_basis(basis, tables[2::3], carve(flat, self._basis_scratch()))
        r, _ = frequencies(self._lengths)
        basis[:r, 1] = 0
        if self.problem.direction is Direction.BACKWARD_FILTER:  # of the inverse
            basis[:r] *= 1 / math.prod(self._lengths)
            basis[r:] *= 2 / math.prod(self._lengths)
        x, y = (self._x, tables[0::3], xs), (self._y, tables[1::3], ys)
        flat_x, flat_y = (s.reshape(*s.shape[:2], -1, s.shape[-1]) for s in (xs, ys))
        products, back = self._products, methodcaller("inverse", accumulate)
        if self.problem.direction is Direction.BACKWARD_FILTER:
            _transform(workers, scratch, x, a)
            _transform(workers, scratch, y, b)
            products.gradient(workers, basis, flat_x, flat_y, kernel, scratch)
            dw = self._stored(out).reshape(-1)

            def add(_: int, start: int, stop: int) -> None:
                target = dw[start:stop]
                if not accumulate:
                    target[...] = 0
                for share in kernel:
                    np.add(target, share[start:stop], out=target)

            workers.ranges(len(dw), add)
            return
        (source, flat), (result, target) = (x, flat_x), (y, flat_y)
        if self.problem.direction is Direction.BACKWARD_DATA:
            source, flat, result, target = result, target, source, flat
        _transform(workers, scratch, source, a)
        products.apply(workers, basis, flat, target, self._stored(b), kernel, scratch)
        _transform(workers, scratch, result, out, back)

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

    def _stored(self, w: Any) -> Any:
        """Return a filter's view in the order of its memory."""
        return np.moveaxis(w, 1, -1) if self.problem.layout == "NHWC" else w

    def _basis_scratch(self) -> list[Region]:
        p = self.problem
        return basis_scratch(self._lengths, p.w_shape[:1:-1], p.dtype)

    def _list_regions(self, nworkers: int) -> list[Region]:
        """List basis, spectra, scratch a worker, tables, filter or partial sums."""
        p, products = self.problem, self._products
        each = max(
            *(nbytes(s.scratch(*s.chunk_shape(nworkers))) for s in (self._x, self._y)),
            nbytes(products.scratch()),
            -(-nbytes(self._basis_scratch()) // (64 * nworkers)) * 64,
        )
        tables = [
            ((axis.length, len(at)), p.dtype)
            for axis in self._axes
            for at in (axis.x_at, axis.y_at, axis.w_at)
        ]
        spectra, scratch = (self._x.spectrum, self._y.spectrum), (nworkers, each)
        basis = (products.frequencies, 2, math.prod(p.w_shape[2:])), p.dtype
        return [basis, *spectra, (scratch, "uint8"), *tables, products.filter(nworkers)]

    def _fill_tables(self, tables: Sequence[Any]) -> None:
        """Fill the tables of x, y and w per axis; inverse ones for the result."""
        direction = self.problem.direction
        for i, axis in enumerate(self._axes):
            back = {"scale": 1 / axis.length, "pair": 2.0 if i == 0 else 1.0}
            x, y, w = tables[3 * i : 3 * i + 3]
            to_x = direction is Direction.BACKWARD_DATA
            fill_table(x, axis.x_at, **(back if to_x else {}))
            to_y = direction is Direction.FORWARD
            fill_table(y, axis.y_at, **(back if to_y else {}))
            fill_table(w, axis.w_at)


def _transform(
    workers: Workers,
    scratch: Any,
    job: _Job,
    tensor: Any,
    transform: Callable[[ChunkTransform], None] = ChunkTransform.forward,
) -> None:
    """Transform all chunks of a tensor."""
    plan, tables, spectrum = job

    def work(worker: int, chunk: Chunk) -> None:
        own = scratch[worker]
        transform(ChunkTransform(plan, tables, tensor, spectrum, chunk, own))

    workers.each(plan.chunks(workers.count), work)


# Products of spectra, one block of frequencies at a time.
#
# The filter's spectrum, usually the largest of the three, is never whole in memory. A
# filter has few taps, so a block of its frequencies is one matrix product with the DFT
# of the single taps (the basis). It is computed (or, for the filter gradient, consumed)
# just when its block is multiplied, while it is in the cache.
#
# A complex product is done as real ones. Real and imaginary parts of all samples are
# the rows of one matrix, which turns the four real products into two, with their sums
# afterwards. BLAS runs this as fast as its complex product, and planar storage saves
# the transforms from interleaving. A filter gradient sums over the rows, so there [re;
# im] times [im; -re] gives the imaginary part directly.


_BLOCK_BYTES = 1 << 20  # bytes of a block's arrays; about a core's second-level cache
_LEAST = 16  # frequencies of a block; the product with the basis is slow with fewer
_ROWS = 256  # samples and tiles whose products are summed while they are in the cache
_PIECE = 16  # output channels of the filter that are copied at a time


class Products:
    """The multiplication of the spectra of one problem.

    Spectra of x and y are (frequencies, 2, rows, channels), where rows are samples
    times tiles; the basis is (frequencies, 2, taps).
    """

    def __init__(self, problem: ConvProblem, frequencies: int, rows: int) -> None:
        self.problem, self.frequencies, self.rows = problem, frequencies, rows
        self._weights = math.prod(problem.w_shape[:2])
        self._taps = math.prod(problem.w_shape[2:])
        # Whether channels are the last axis of the filter in memory.
        self._channels_last = problem.layout == "NHWC" and problem.w_shape[1] > 1
        each = sum(map(math.prod, self._arrays(1))) * problem.itemsize
        self._block = min(max(_BLOCK_BYTES // each, _LEAST), frequencies)

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

        def work(worker: int, block: slice) -> None:
            spectrum, products = carve(scratch[worker], self.scratch())
            part = spectrum[: block.stop - block.start]
            rows = basis[block].reshape(-1, self._taps)
            np.matmul(rows, taps, out=part.reshape(-1, self._weights))
            for row in range(0, self.rows, _ROWS):
                at = (block, slice(None), slice(row, row + _ROWS))
                self._multiply(source[at], part, result[at], products.reshape(-1))

        workers.each(self._blocks(), work)

    def _blocks(self) -> list[slice]:
        """Return the blocks of frequencies."""
        count, size = self.frequencies, self._block
        return [slice(i, min(i + size, count)) for i in range(0, count, size)]

    def _gather(self, workers: Workers, w: Any, taps: Any) -> None:
        """Copy a filter to (taps, groups, channels summed over, other channels)."""
        # BLAS takes the right-hand matrix of a product much faster if its rows are
        # contiguous, and copying the taps is cheaper than copying their spectra.
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
        """Compute W = X conj(Y), transformed back, as one partial sum per worker."""
        blocks = self._blocks()
        sums[...] = 0

        def work(worker: int, start: int, stop: int) -> None:
            spectrum, rotated, share = carve(scratch[worker], self.scratch())
            for block in blocks[start:stop]:
                count = block.stop - block.start
                arrays = spectrum[:count], rotated[:count], share
                self._correlate(basis[block], xs[block], ys[block], arrays)
                np.add(sums[worker], share.reshape(-1), out=sums[worker])

        # A fixed assignment of blocks to workers makes the result deterministic.
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
