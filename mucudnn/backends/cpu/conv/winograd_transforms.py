"""Winograd's minimal filtering F(m, 3): transforms of images and of filters.

m outputs of a 3-tap correlation cost m + 2 multiplications instead of 3 m:
y = Aᵀ [(G g) ⊙ (Bᵀ d)] (Winograd 1980; Lavin and Gray 2016, section 4). A tile of
several dimensions takes each matrix once an axis.

No tile is gathered. `band` widens Bᵀ (or A) to a matrix that maps a stretch of an image
axis to several tiles at once; overlap, padding and cropping are repeats and zeros in
it. A transform is then one matrix product an axis, directly from and to the caller's
tensors in any layout: the products with zeros cost less than the copies would.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv.algorithm import Region
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction

TAPS = 3
"""Filter taps along an axis."""

Rows = tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True, slots=True)
class Minimal:
    """The exact matrices of F(m, 3).

    Bᵀ, (m + 2, m + 2), maps a tile of the input to its m + 2 values; G, (m + 2, 3), the
    taps to theirs; Aᵀ, (m, m + 2), their products to m outputs.
    """

    data: Rows
    filter: Rows
    output: Rows

    @property
    def step(self) -> int:
        """Outputs of a tile, m."""
        return len(self.output)

    @property
    def points(self) -> int:
        """Values of a tile, m + 2."""
        return len(self.data)

    def kernel_matrix(self, rank: int, *, flip: bool, dtype: str) -> Any:
        """Return the filter's transform over all axes at once, (points^rank, 3^rank).

        Rows count the points with the first axis fastest, the order of `analyse`;
        columns count the taps with the last axis fastest, the order of filters. `flip`
        reverses the filter along every axis. The result is in Fortran order, as BLAS
        multiplies this small shape faster that way.
        """
        g: Any = np.array(self.filter, np.float64)
        full: Any = functools.reduce(np.kron, [g] * rank)
        full = full.reshape(*[self.points] * rank, -1)
        rows = full.transpose(*reversed(range(rank)), rank).reshape(-1, TAPS**rank)
        return np.asfortranarray(rows[:, ::-1] if flip else rows, dtype)


def _rows(text: str) -> Rows:
    return tuple(tuple(map(Fraction, line.split())) for line in text.split(";"))


MINIMAL = {
    2: Minimal(
        data=_rows("1 0 -1 0; 0 1 1 0; 0 -1 1 0; 0 1 0 -1"),
        filter=_rows("1 0 0; 1/2 1/2 1/2; 1/2 -1/2 1/2; 0 0 1"),
        output=_rows("1 1 1 0; 0 1 -1 -1"),
    ),
    4: Minimal(
        data=_rows(
            "4 0 -5 0 1 0; 0 -4 -4 1 1 0; 0 4 -4 -1 1 0;"
            "0 -2 -1 2 1 0; 0 2 -1 -2 1 0; 0 4 0 -5 0 1"
        ),
        filter=_rows(
            "1/4 0 0; -1/6 -1/6 -1/6; -1/6 1/6 -1/6;"
            "1/24 1/12 1/6; 1/24 -1/12 1/6; 0 0 1"
        ),
        output=_rows("1 1 1 1 1 0; 0 1 -1 2 -2 0; 0 1 1 4 4 0; 0 1 -1 8 -8 1"),
    ),
}
"""F(2, 3) and F(4, 3) by outputs a tile (Lavin and Gray 2016, section 4)."""


def band(
    out: Any, matrix: Any, tiles: tuple[int, int], step: int, pad: int, start: int
) -> None:
    """Write the matrix that applies `matrix` to every tile of a range.

    `out` is (points * tiles, stretch of the axis), its rows with the tile fastest.
    Tiles are `step` apart, from `pad` zeros before the axis on (cropped if negative);
    the stretch begins at position `start` of the axis.
    """
    out[...] = 0
    count, reach = tiles[1] - tiles[0], matrix.shape[1]
    for t in range(count):
        first = (tiles[0] + t) * step - pad - start
        low, high = max(0, first), min(out.shape[1], first + reach)
        if low < high:
            out[t::count, low:high] = matrix[:, low - first : high - first]


def analyse(
    images: Any, bands: Sequence[Any], points: int, out: Any, scratch: Sequence[Any]
) -> None:
    """Transform every tile of images: one matrix product an axis, last axis first.

    `images` are (samples, *spatial, channels), of any strides; `bands` (points * tiles,
    spatial) an axis. `out` is (samples, points^(rank - 1), points * tiles of axis 0,
    tiles of the others * channels), where the points of the last axis count slowest.
    `scratch` has two flat arrays, used in turns; see `Plan.scratch_items`.
    """
    state = images[..., None, :, :]
    for axis in range(len(bands) - 1, 0, -1):
        *lead, done, _, columns = state.shape
        rows = len(bands[axis])
        target = _cut(scratch[axis % 2], (*lead, done, rows, columns))
        np.matmul(bands[axis], state, out=target)
        merged = (*lead, done * points, rows // points * columns)
        state = target.reshape(merged).swapaxes(-3, -2)
    np.matmul(bands[0], state, out=out)


def synthesise(
    values: Any,
    bands: Sequence[Any],
    points: int,
    images: Any,
    scratch: Sequence[Any],
    *,
    add: bool,
) -> None:
    """Transform products back into images: `analyse` transposed, first axis first.

    The arguments are those of `analyse`. With `add` the result is added to the images;
    the scratch array that is free then, the first if the rank is even, holds it before.
    """
    # Intermediate states alternate between the two scratch arrays.
    state = values
    for axis, matrix in enumerate(bands[:-1]):
        *lead, left, _, columns = state.shape
        rows = matrix.shape[1]
        target = _cut(scratch[(axis + 1) % 2], (*lead, rows, left, columns))
        np.matmul(matrix.T, state, out=target.swapaxes(-3, -2))
        tiles = len(bands[axis + 1]) // points
        state = target.reshape(
            *lead, rows, left // points, points * tiles, columns // tiles
        )
    # The last axis writes the images, or scratch from which they are added.
    out = images
    if add:
        flat = scratch[len(bands) % 2]
        if images.strides[-1] == images.itemsize:
            out = _cut(flat, images.shape)
        else:  # channels first in memory
            samples, *spatial, channels = images.shape
            out = np.moveaxis(_cut(flat, (samples, channels, *spatial)), 1, -1)
    np.matmul(bands[-1].T, state, out=out[..., None, :, :])
    if add:
        np.add(images, out, out=images)


def _cut(flat: Any, shape: Sequence[int]) -> Any:
    return flat[: math.prod(shape)].reshape(shape)


# The transformed filter (G ⊗ G) w in the workspace, and the adjoint for gradients.


_LINE = 64
"""Padding in bytes between the values' planes. Their distance is often a power of two,
and then all values of a filter tap would compete for the same cache lines.
"""

_SMALL = 1 << 18  # values up to which one thread transforms a filter faster


def filter_region(problem: ConvProblem, minimal: Minimal, sums: int = 1) -> Region:
    """Return the region of the transformed filter, or of sums of its gradient."""
    values = minimal.points ** (len(problem.w_shape) - 2)
    k, c_per_group = problem.w_shape[:2]
    return (sums, values, k * c_per_group + _LINE // problem.itemsize), problem.dtype


class Filter:
    """The transformed values of a filter in the workspace.

    They are stored with the summed channels first, (values, C / groups, K) forward and
    (values, K, C / groups) otherwise, so that no matrix product needs a transposed
    operand. Channels-last filters can be read along C only and always take the second
    form. `room` is an array of `filter_region`; methods use its first sum unless told
    otherwise.
    """

    def __init__(self, problem: ConvProblem, minimal: Minimal, room: Any) -> None:
        self._problem = problem
        self._forward = problem.direction is Direction.FORWARD
        self._along_k = self._forward and problem.layout == "NCHW"
        k, c_per_group, *kernel = problem.w_shape
        shape = (c_per_group, k) if self._along_k else (k, c_per_group)
        self._room = room
        self._sums = room[..., : k * c_per_group].reshape(*room.shape[:2], *shape)
        self._stored = self._sums[0]
        flip = problem.direction is Direction.BACKWARD_DATA
        rank, dtype = len(kernel), problem.dtype
        self._matrix = minimal.kernel_matrix(rank, flip=flip, dtype=dtype)

    def values(self, of: int = 0) -> Any:
        """Return one sum as (values, groups, source channels, result channels)."""
        stored, groups = self._sums[of], self._problem.groups
        if self._along_k:
            return stored.reshape((*stored.shape[:2], groups, -1)).swapaxes(1, 2)
        view = stored.reshape(len(stored), groups, -1, stored.shape[2])
        return view.swapaxes(2, 3) if self._forward else view

    def transform(self, w: Any, workers: Workers) -> None:
        """Fill the values from a filter (K, C / groups, *kernel)."""
        taps = w.reshape(*w.shape[:2], -1)
        taps = taps.transpose(1, 2, 0) if self._along_k else taps.transpose(0, 2, 1)
        out = self._stored.swapaxes(0, 1)

        def part(_: int, start: int, stop: int) -> None:
            np.matmul(self._matrix, taps[start:stop], out=out[start:stop])

        if self._stored.size <= _SMALL:
            part(0, 0, len(taps))
        else:
            workers.ranges(len(taps), part)

    def add(
        self, of: int, others: Sequence[int], workers: Workers | None = None
    ) -> None:
        """Add other sums to one of them, on this thread or by workers."""
        first, rest = self._room[of], [self._room[i] for i in others]

        def part(_: int, start: int, stop: int) -> None:
            # Includes the padding: NumPy would copy arrays that have gaps.
            for other in rest:
                np.add(first[start:stop], other[start:stop], out=first[start:stop])

        if workers is None or first.size * len(rest) <= _SMALL:
            part(0, 0, len(first))
        else:
            workers.ranges(len(first), part)

    def gradient(self, dw: Any, spare: Any, accumulate: bool, workers: Workers) -> None:
        """Apply the transposed transform to the values, which are a gradient.

        The result is written or added to `dw` (K, C / groups, *kernel); `spare` is
        (workers, at least max(K, taps of a filter) * C / groups).
        """
        dw = dw.reshape(*dw.shape[:2], -1)
        values = self._stored.transpose(1, 2, 0)
        rows = max(1, min(spare.shape[1] // dw[0].size, -(-len(dw) // len(spare))))

        def part(worker: int, start: int) -> None:
            k = slice(start, start + rows)
            out, of = dw[k], values[k]
            fresh = spare[worker, : out.size].reshape(out.shape)
            np.matmul(of, self._matrix, out=fresh if accumulate else out)
            if accumulate:
                np.add(out, fresh, out=out)

        starts = range(0, len(dw), rows)
        if self._stored.size <= _SMALL:
            for start in starts:
                part(0, start)
        else:
            workers.each(starts, part)
