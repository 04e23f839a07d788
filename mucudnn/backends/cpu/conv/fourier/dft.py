"""Discrete Fourier transforms of real images by matrix products.

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv.carve import Region

__all__ = [
    "Columns",
    "Window",
    "basis_scratch",
    "fill_basis",
    "fill_table",
    "frequencies",
    "halves",
    "merge",
    "planar",
    "split",
]

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

    Args:
        table: Output; its first size is the length n of the transform.
        positions: Position of each column's sample, modulo n.
        scale: Factor of every row; 1 / n for an inverse.
        pair: Further factor of the rows that stand for two frequencies.
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

    Args:
        spectrum: Complex columns.
        r: Real columns among those of `out`.
        out: Output.
        pair: Factor for the conjugate of a real column's frequency: 2, or 1 if the
            table includes it.
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
    """Write the DFT of every single tap of a filter.

    Args:
        basis: Output (frequencies, 2, taps), taps in row-major order.
        tables: Tables of the filter, innermost axis first.
        scratch: Arrays as listed by `basis_scratch`.
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
