"""How kernels divide their work: fixed tiles, shared by the workers.

A tile is large, because each NumPy call of two threads may cost them a hand-over of the
interpreter lock, and small enough for a core's second-level cache, so that a formula of
many passes reads main memory once. Tiles depend on shapes only: results are the same
bits whatever the number of workers.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mucudnn.backends.cpu.threads import Workers

__all__ = ["BLOCK_BYTES", "Attrs", "KernelCall", "Run", "as_ncs", "greedy", "tiles"]

T = TypeVar("T")

Attrs = Mapping[str, Any]

BLOCK_BYTES = 256 << 10
"""Bytes of each operand of a tile."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of a kernel: dense arrays, and the threads to share the work."""

    workers: Workers
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    attrs: Attrs

    def share(self, items: Sequence[T], fn: Callable[[T], object]) -> None:
        """Call `fn(item)` for each, on all workers."""
        self.workers.each(items, lambda _, item: fn(item), max(1, len(items)))

    def tiles_of(
        self,
        array: Any,
        fn: Callable[[tuple[slice, ...]], object],
        nbytes: int = BLOCK_BYTES,
    ) -> None:
        """Call `fn(part)` for each tile of an array."""
        self.share(tiles(array.shape, nbytes // array.itemsize), fn)

    def flat_blocks(
        self,
        arrays: Sequence[Any],
        fn: Callable[..., object],
        nbytes: int = BLOCK_BYTES,
    ) -> None:
        """Call `fn(*parts)` with the same contiguous range of every flattened array."""
        flat = [a.reshape(-1) for a in arrays]
        step = nbytes // max(a.itemsize for a in flat)
        self.share(
            range(0, flat[0].size, step),
            lambda start: fn(*(a[start : start + step] for a in flat)),
        )


Run = Callable[[KernelCall], None]
"""A kernel: writes into the outputs of its call."""


def greedy(shape: Sequence[int], limit: int) -> tuple[int, ...]:
    """The largest tile of at most `limit` elements, last axes kept whole first."""
    tile: list[int] = []
    for size in reversed(shape):
        tile.append(max(1, min(size, limit)))
        limit = max(1, limit // tile[-1]) if tile[-1] == size else 1
    return tuple(reversed(tile))


def tiles(shape: Sequence[int], limit: int) -> list[tuple[slice, ...]]:
    """Slices that cover a shape in tiles of at most `limit` elements."""
    steps = greedy(shape, limit)
    ranges = (
        [slice(i, min(i + step, size)) for i in range(0, size, step)]
        for size, step in zip(shape, steps, strict=True)
    )
    return list(itertools.product(*ranges))


def as_ncs(array: Any) -> Any:
    """A view (N, C, S) of (N, C, *spatial); S is 1 without spatial axes."""
    N, C, *spatial = array.shape
    return array.reshape(N, C, math.prod(spatial))
