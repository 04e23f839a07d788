"""Division of a kernel's work into fixed tiles, shared by the workers.

A tile is large, because each NumPy call of two threads may cost them a hand-over of the
interpreter lock, and small enough for a share of the last-level cache, so that many
passes of a formula read main memory once. Tiles depend on shapes only: results are
bit-identical for any number of workers.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mucudnn.backends.cpu.threads import Scratch, Workers

T = TypeVar("T")
Attrs = Mapping[str, Any]
Part = tuple[slice, ...]
"""Slices of an array, one per axis."""

BLOCK_BYTES = 512 << 10
"""Bytes of each operand of a tile."""

LARGE_BYTES = 2 << 20
"""Bytes of an operand if a tile takes no memory, or a thread's scratch alone."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of a kernel: dense arrays, and the threads that share the work."""

    workers: Workers
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    attrs: Attrs

    @property
    def scratch(self) -> Scratch:
        """Each thread's own memory for one intermediate result."""
        return self.workers.scratch

    def share(self, items: Sequence[T], fn: Callable[[T], object]) -> None:
        """Call `fn(item)` for each, on all workers."""
        self.workers.each(items, lambda _, item: fn(item), max(1, len(items)))

    def tiles_of(
        self, array: Any, fn: Callable[[Part], object], nbytes: int = BLOCK_BYTES
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
_PORTIONS = 4  # least tiles of a large array; more do not pay off on two cores
_WORTH = 1 << 16  # least elements worth handing to a thread
Run = Callable[[KernelCall], None]
"""A kernel: writes into the outputs of its call."""


def shared(total: int, limit: int) -> int:
    """Return the elements of a tile: `limit`, or fewer to occupy all workers."""
    return min(limit, max(_WORTH, -(-total // _PORTIONS)))


def even(total: int, limit: int, unit: int = 1) -> int:
    """Return the size of a portion: `total`, or one of an even number of portions."""
    if total <= limit:
        return max(1, total)
    # An even number of portions lets two workers finish together.
    count = -(-total // limit)
    portion = -(-total // (count + count % 2))
    return min(max(1, limit), -(-portion // unit) * unit)


def tiles(shape: Sequence[int], limit: int) -> list[Part]:
    """Return slices that cover a shape in tiles of at most `limit` elements.

    Tiles are as large as possible and whole along the last axes.
    """
    ranges = []
    for size in reversed(shape):
        step = max(1, min(size, limit))
        limit = max(1, limit // step) if step == size else 1
        ranges.append([slice(i, min(i + step, size)) for i in range(0, size, step)])
    return list(itertools.product(*reversed(ranges)))


def as_ncs(array: Any) -> Any:
    """View (N, C, *spatial) as (N, C, S); S is 1 without spatial axes."""
    N, C, *spatial = array.shape
    return array.reshape(N, C, math.prod(spatial))
