"""How kernels divide their work: fixed tiles, shared by the workers.

A tile is large, because each NumPy call of two threads may cost them a hand-over of the
interpreter lock, and small enough for a share of the last-level cache, so that many
passes of a formula read main memory once. Tiles depend on shapes only: results are the
same bits whatever the number of workers.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mucudnn.backends.cpu.scratch import Scratch
from mucudnn.backends.cpu.threads import Workers

__all__ = [
    "BLOCK_BYTES",
    "LARGE_BYTES",
    "Attrs",
    "KernelCall",
    "Run",
    "as_ncs",
    "even",
    "greedy",
    "shared",
    "tiles",
]

T = TypeVar("T")

Attrs = Mapping[str, Any]

BLOCK_BYTES = 512 << 10
"""Bytes of each operand of a tile."""

LARGE_BYTES = 2 << 20
"""The same where a tile takes no memory of its own, or a thread's scratch alone."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of a kernel: dense arrays, and the threads to share the work."""

    workers: Workers
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    attrs: Attrs

    @property
    def scratch(self) -> Scratch:
        """Memory for one intermediate result, each thread's own."""
        return self.workers.scratch

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
        most = shared(array.size, nbytes // array.itemsize)
        self.share(tiles(array.shape, most), fn)

    def flat_blocks(
        self,
        arrays: Sequence[Any],
        fn: Callable[..., object],
        nbytes: int = BLOCK_BYTES,
    ) -> None:
        """Call `fn(*parts)` with the same contiguous range of every flattened array."""
        flat = [a.reshape(-1) for a in arrays]
        most = shared(flat[0].size, nbytes // max(a.itemsize for a in flat))
        step = even(flat[0].size, most, _LANES)
        self.share(
            range(0, flat[0].size, step),
            lambda start: fn(*(a[start : start + step] for a in flat)),
        )


_LANES = 16  # elements of the widest vector registers
_PORTIONS = 4  # at least, of what is worth it: more cost two cores more than they give
_WORTH = 1 << 16  # elements that are worth handing to a thread

Run = Callable[[KernelCall], None]
"""A kernel: writes into the outputs of its call."""


def shared(total: int, limit: int) -> int:
    """How many of `total` elements make a tile: `limit`, or fewer, so that all work."""
    return min(limit, max(_WORTH, -(-total // _PORTIONS)))


def even(total: int, limit: int, unit: int = 1) -> int:
    """How many of `total` make a portion: all, or one of an even number of portions.

    So that workers end together. A portion is at most `limit`, and whole units.
    """
    if total <= limit:
        return max(1, total)
    count = -(-total // limit)
    portion = -(-total // (count + count % 2))
    return min(max(1, limit), -(-portion // unit) * unit)


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
