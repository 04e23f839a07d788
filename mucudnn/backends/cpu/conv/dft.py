"""Separable discrete Fourier transforms of real tiles, by matrix products.

One axis at a time is multiplied by a small real matrix whose rows are cosines and
(negated) sines. Through BLAS this is several times faster than a radix transform, which
NumPy runs one line at a time, for every length a convolution has (up to hundreds), and
it puts the transformed axis in front, where the products per frequency need it.
Padding, dilation and stride cost nothing: positions that hold zeros have no column, and
unwanted positions have no row.

Real input has a redundant spectrum, of which only the independent half is stored. Along
the first axis n real values become one or two real frequencies (0 and, for even n,
n / 2) and (n - 1) // 2 complex ones. Along every further axis a real column does the
same, and a complex one becomes n complex ones: k and -k from the sum and the difference
of the same two products. So the frequencies of a spectrum are `r` real ones, then `z`
complex ones, with r + 2 z = the number of points. Planar storage (real part, imaginary
part) keeps all arithmetic in real matrix products.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv.algorithm import Region, carve

_INDICES = 1024  # computed at a time, as they are allocated outside the workspace


@dataclass(frozen=True, slots=True)
class Window:
    """A tile's part of an axis: indices `start:stop` at columns from `column` on."""

    start: int
    stop: int
    column: int

    @property
    def columns(self) -> slice:
        """Columns of the table."""
        return slice(self.column, self.column + self.stop - self.start)


def _num_real(n: int) -> int:
    return 2 - n % 2


def _num_pairs(n: int) -> int:
    return (n - 1) // 2


def frequencies(lengths: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of real and complex frequencies of a real image."""
    r, z = 1, 0
    for n in lengths:
        r, z = r * _num_real(n), r * _num_pairs(n) + z * n
    return r, z


def fill_table(
    table: Any, positions: range, *, scale: float = 1.0, pair: float = 1.0
) -> None:
    """Write the real DFT matrix (n, positions): rows of cos, then of -sin.

    `positions` are those of the columns' samples, modulo n. Every row is multiplied by
    `scale`, and rows that stand for two frequencies by `pair` too.
    """
    n, width = table.shape
    r, z = _num_real(n), _num_pairs(n)
    angle = np.arange(n) * (2 * math.pi / n)
    at = np.array(positions) % n
    ones = (np.array([0, n // 2][:r]), np.cos(angle) * scale)
    pairs = np.arange(1, z + 1)
    cosines = (pairs, np.cos(angle) * (scale * pair))
    sines = (pairs, np.sin(angle) * (-scale * pair))
    rows, step = 0, max(1, _INDICES // width)
    for frequency, wave in (ones, cosines, sines):
        values = wave.astype(table.dtype)
        for i in range(0, len(frequency), step):
            index = np.outer(frequency[i : i + step], at) % n
            # "raise", the default mode, would allocate a second output
            np.take(values, index, out=table[rows : rows + len(index)], mode="clip")
            rows += len(index)


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns by kind: `r` real ones, and the two parts of `z` complex ones."""

    real: Any
    re: Any
    im: Any


def planar(state: Any, r: int) -> Columns:
    """Split an intermediate array into its columns: real, re, im, in this order."""
    z = (len(state) - r) // 2
    return Columns(state[:r], state[r : r + z], state[r + z :])


def halves(spectrum: Any, r: int) -> Columns:
    """Split a whole spectrum (frequencies, 2, …) into its columns."""
    return Columns(spectrum[:r, 0], spectrum[r:, 0], spectrum[r:, 1])


def _blocks(part: Any, r: int, z: int, n: int) -> tuple[Any, Any, Any, Any]:
    """Split one part of the complex columns after an axis of n points by origin.

    Return (r, pairs) from real columns and, from complex ones, (z, real frequencies),
    (z, pairs +) and (z, pairs -).
    """
    ones, pairs, tail = _num_real(n), _num_pairs(n), part.shape[1:]
    a, b, c = r * pairs, r * pairs + z * ones, r * pairs + z * (ones + pairs)
    return (
        part[:a].reshape(r, pairs, *tail),
        part[a:b].reshape(z, ones, *tail),
        part[b:c].reshape(z, pairs, *tail),
        part[c:].reshape(z, pairs, *tail),
    )


def _cut(columns: Any, n: int) -> tuple[Any, Any, Any]:
    """Split the rows of a table's product into real frequencies, cosines, -sines."""
    a, b = _num_real(n), _num_real(n) + _num_pairs(n)
    return columns[:, :a], columns[:, a:b], columns[:, b:]


def split(product: Any, r: int, out: Columns) -> None:
    """Combine the products (columns, n, …) with an axis's table to complex columns.

    With c and s the rows of cos and -sin, exp(-i t) (a + i b) = (c a - s b) +
    i (s a + c b), and for the opposite frequency s changes its sign.
    """
    n = product.shape[1]
    kinds = planar(product, r)
    z = len(kinds.re)
    ones, cos, sin = _cut(kinds.real, n)
    out.real.reshape(ones.shape)[...] = ones
    re = _blocks(out.re, r, z, n)
    im = _blocks(out.im, r, z, n)
    re[0][...], im[0][...] = cos, sin
    a1, ac, as_ = _cut(kinds.re, n)
    b1, bc, bs = _cut(kinds.im, n)
    re[1][...], im[1][...] = a1, b1
    np.subtract(ac, bs, out=re[2])
    np.add(as_, bc, out=im[2])
    np.add(ac, bs, out=re[3])
    np.subtract(bc, as_, out=im[3])


def merge(spectrum: Columns, r: int, out: Any, pair: float) -> None:
    """Undo `split`: complex columns to (columns, n, …), the input of an inverse table.

    `r` are the real columns among those of `out`; `pair` is the factor for the
    conjugate of a real column's frequency: 2, or 1 if the table includes it.
    """
    n = out.shape[1]
    kinds = planar(out, r)
    z = len(kinds.re)
    ones, cos, sin = _cut(kinds.real, n)
    ones[...] = spectrum.real.reshape(ones.shape)
    re = _blocks(spectrum.re, r, z, n)
    im = _blocks(spectrum.im, r, z, n)
    np.multiply(re[0], pair, out=cos)
    np.multiply(im[0], pair, out=sin)
    a1, ac, as_ = _cut(kinds.re, n)
    b1, bc, bs = _cut(kinds.im, n)
    a1[...], b1[...] = re[1], im[1]
    np.add(re[2], re[3], out=ac)
    np.subtract(im[2], im[3], out=as_)
    np.add(im[2], im[3], out=bc)
    np.subtract(re[3], re[2], out=bs)


def basis_scratch(
    lengths: Sequence[int], taps: Sequence[int], dtype: str
) -> list[Region]:
    """List the arrays that `fill_basis` needs; both arguments innermost axis first."""
    regions: list[Region] = []
    for level in range(1, len(lengths)):
        size = math.prod(lengths[: level + 1]) * math.prod(taps[: level + 1])
        regions += [((size,), dtype)] * (1 if level == len(lengths) - 1 else 2)
    return regions


def fill_basis(basis: Any, tables: Sequence[Any], scratch: Sequence[Any]) -> None:
    """Write the DFT of every single tap of a filter to (frequencies, 2, taps).

    Taps are in row-major order; `tables` are the filter's, innermost axis first, and
    `scratch` has the arrays of `basis_scratch`.
    """
    last, free = len(tables) - 1, iter(scratch)
    state, r = tables[0], _num_real(len(tables[0]))
    for level, table in enumerate(tables[1:], start=1):
        n, width = table.shape
        columns, taps = state.shape
        product = next(free).reshape(columns, n, width, taps)
        np.multiply(table[:, :, None], state[:, None, None, :], out=product)
        product = product.reshape(columns, n, width * taps)
        if level == last:
            split(product, r, halves(basis, r * _num_real(n)))
        else:
            state = next(free).reshape(columns * n, width * taps)
            split(product, r, planar(state, r * _num_real(n)))
        r *= _num_real(n)
    if last == 0:
        split(state[None], 1, halves(basis, r))


# The separable Fourier transform of the tiles of one tensor, forward and inverse.
#
# A tensor is cut into chunks of samples or channels, the workers' units of work, so
# that a chunk's intermediate arrays stay in the processor's cache. Within a chunk the
# transform runs over the spatial axes, innermost first, and within an axis over the
# tiles. No tile is copied out of its image: a window of an axis is a matrix with a
# longer row stride, which BLAS accepts. Channels-last tensors take one small product
# per pixel line instead of one large product, and need no transposition either.


_CHUNK_BYTES = 1 << 20  # of intermediate arrays; about a core's second-level cache
_CHANNELS = 16  # unit of the number of channels of a chunk smaller than a sample


Chunk = tuple[slice, slice]
"""Samples and channels of a tensor that are transformed together."""


@dataclass(frozen=True, slots=True)
class Separable:
    """The transform of one tensor (N, C, *spatial).

    Sequences run over the spatial axes, innermost first: points of the transform, sizes
    of the tensor, and tiles. With `channels_last` the channels are contiguous.
    """

    batch: int
    channels: int
    lengths: tuple[int, ...]
    sizes: tuple[int, ...]
    windows: tuple[tuple[Window, ...], ...]
    channels_last: bool
    dtype: str

    @property
    def spectrum(self) -> Region:
        """Region (frequencies, 2, *tiles, N, C), real and imaginary parts."""
        tiles = (len(windows) for windows in self.windows)
        shape = (sum(frequencies(self.lengths)), 2, *tiles, self.batch, self.channels)
        return shape, self.dtype

    def scratch(self, samples: int, channels: int) -> list[Region]:
        """Return a chunk's intermediate regions: states, products, an output tile."""
        planes, rank = samples * channels, len(self.sizes)
        # After `done` axes an array is (columns, planes x pixels). States are between
        # axes. The product with the first table is a state, the later ones are not.
        states, products = range(1, rank), range(min(2, rank), rank + 1)
        shapes: list[tuple[int, ...]] = [
            (math.prod(self.lengths[:done]), planes * math.prod(self.sizes[done:]))
            for done in (*states, *products)
        ]
        widest = max(w.stop - w.start for w in self.windows[0])
        shapes.append((planes * math.prod(self.sizes[1:]) * widest,))
        return [(shape, self.dtype) for shape in shapes]

    def chunk_shape(self, nworkers: int) -> tuple[int, int]:
        """Return the numbers of samples and channels of the largest chunk."""
        plane = sum(math.prod(shape) for shape, _ in self.scratch(1, 1))
        planes = max(1, _CHUNK_BYTES // (plane * np.dtype(self.dtype).itemsize))
        if planes >= self.channels:
            fair = -(-self.batch // nworkers)
            return min(fair, planes // self.channels), self.channels
        step = max(1, planes // _CHANNELS) * _CHANNELS
        return 1, min(step, self.channels)

    def chunks(self, nworkers: int) -> Iterator[Chunk]:
        """Yield all chunks lazily: a list of thousands would take memory too."""
        samples, channels = self.chunk_shape(nworkers)
        for n in range(0, self.batch, samples):
            for c in range(0, self.channels, channels):
                yield slice(n, n + samples), slice(c, c + channels)


class ChunkTransform:
    """The transform of a chunk of a tensor and its part of a spectrum.

    Images are (planes, …, size) or, channels last, (samples, …, size, channels); states
    have an axis of columns in front.
    """

    def __init__(
        self,
        plan: Separable,
        tables: Sequence[Any],
        tensor: Any,
        spectrum: Any,
        chunk: Chunk,
        workspace: Any,
    ) -> None:
        image, rank = tensor[chunk], len(plan.sizes)
        *arrays, self.tile = carve(workspace, plan.scratch(*image.shape[:2]))
        states, products = arrays[: rank - 1], arrays[rank - 1 :]
        # The first axis has real lines: its product already is the state of the second.
        self.states, self.products = [None, *states], [*states[:1], *products]
        if plan.channels_last:
            self.image = image.transpose(0, *range(2, 2 + rank), 1)
        else:
            self.image = image.reshape(-1, *image.shape[2:])
        self.plan, self.tables = plan, tables
        self.spectrum = spectrum[(..., *chunk)]

    def forward(self) -> None:
        """Transform the image into the spectrum."""
        self._forward(0, self.image[None], ())

    def inverse(self, accumulate: bool) -> None:
        """Transform back, into (or onto) the image."""
        # The tables include the inverse's factors; those of the first axis also the
        # factor 2 for conjugate frequencies.
        for i, window in enumerate(self.plan.windows[0]):
            self._inverse(0, self.image[None], window, (i,), accumulate)

    def _forward(self, level: int, state: Any, tile: tuple[int, ...]) -> None:
        """Transform the axes from `level` on, for all their tiles."""
        lines = self._lines(state, level)
        table, last = self.tables[level], len(self.tables) - 1
        r, _ = frequencies(self.plan.lengths[:level])
        after, _ = frequencies(self.plan.lengths[: level + 1])
        product = self._product(level, lines.shape)
        for i, window in enumerate(self.plan.windows[level]):
            part = lines[:, :, window.start : window.stop]
            own = table[:, window.columns]
            if self.plan.channels_last:
                np.matmul(own, part, out=product.transpose(0, 2, 1, 3))
            else:
                np.matmul(own, part.transpose(0, 2, 1), out=product)
            if level == last:
                out = self.spectrum[(slice(None), slice(None), *tile, i)]
                leaf = product.reshape(*product.shape[:2], *out.shape[-2:])
                split(leaf, r, halves(out, after))
                # Nothing else writes the imaginary part of columns that are real.
                out[:after, 1] = 0
                continue
            following = self.states[level + 1].reshape(-1, *product.shape[2:])
            if level > 0:  # the first product already is the next state
                split(product, r, planar(following, after))
            self._forward(level + 1, following, (*tile, i))

    def _inverse(
        self,
        level: int,
        state: Any,
        window: Window,
        tile: tuple[int, ...],
        accumulate: bool,
    ) -> None:
        """Write one tile of `state` from the spectrum of all later axes."""
        if window.start == window.stop:
            return
        lines = self._lines(state, level)
        product = self._product(level, lines.shape)
        last = len(self.tables) - 1
        r, _ = frequencies(self.plan.lengths[:level])
        after, _ = frequencies(self.plan.lengths[: level + 1])
        # Fill `product`: from the spectrum on the last axis, else from all later axes.
        if level == last:
            source = self.spectrum[(slice(None), slice(None), *tile)]
            out = product.reshape(*product.shape[:2], *source.shape[-2:])
            merge(halves(source, after), r, out, 1.0 if level == 0 else 2.0)
        else:
            following = self.states[level + 1].reshape(-1, *product.shape[2:])
            for i, inner in enumerate(self.plan.windows[level + 1]):
                self._inverse(level + 1, following, inner, (*tile, i), False)
            if level > 0:
                merge(planar(following, after), r, product, 2.0)
        # Multiply by the inverse's table, into or onto a window of lines.
        table = self.tables[level][:, window.columns]
        target = out = lines[:, :, window.start : window.stop]
        # A matrix product cannot add to its output: it goes to the tile first.
        if accumulate:
            target = self.tile[: out.size].reshape(out.shape)
        if self.plan.channels_last:
            np.matmul(table.T, product.transpose(0, 2, 1, 3), out=target)
        else:
            np.matmul(product.transpose(0, 2, 1), table, out=target)
        if accumulate:
            np.add(out, target, out=out)

    def _lines(self, state: Any, level: int) -> Any:
        """Return a state as (columns, lines, size[, channels])."""
        size = self.plan.sizes[level]
        if self.plan.channels_last:
            return state.reshape(len(state), -1, size, self.image.shape[-1])
        return state.reshape(len(state), -1, size)

    def _product(self, level: int, lines: tuple[int, ...]) -> Any:
        """Return the buffer of a table's product with lines of this shape."""
        columns, count, _, *channels = lines
        n = self.plan.lengths[level]
        return self.products[level].reshape(columns, n, count, *channels)
