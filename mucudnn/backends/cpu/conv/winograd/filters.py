"""The transformed filter (G ⊗ G) w in the workspace, and the adjoint for gradients."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv.carve import Region
from mucudnn.backends.cpu.conv.winograd.transforms import Minimal
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["Filter", "filter_region", "spare_items"]

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


def spare_items(problem: ConvProblem) -> int:
    """Return the scratch items a worker needs to accumulate gradients."""
    k, c_per_group, *kernel = problem.w_shape
    return max(k, math.prod(kernel)) * c_per_group


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
        self._matrix = minimal.kernel_matrix(
            len(kernel),
            flip=problem.direction is Direction.BACKWARD_DATA,
            dtype=problem.dtype,
        )

    def values(self, of: int = 0) -> Any:
        """Return one sum as (values, groups, source channels, result channels)."""
        stored, groups = self._sums[of], self._problem.groups
        if self._along_k:
            shape = (*stored.shape[:2], groups, -1)
            return stored.reshape(shape).swapaxes(1, 2)
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
        (workers, at least `spare_items`).
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
