"""Segments in which PyTorch's CUDA allocator leaves few gaps between a step's tensors.

The allocator (`c10/cuda/CUDACachingAllocator.cpp`) takes the smallest free block that
holds a tensor, and the lowest of equal ones. It splits off what is left if that is more
than 1 MiB, and a block that is freed merges with free neighbors in its segment. Where
no block is large enough, it reserves another segment. So all gaps follow from the order
of a step's allocations and from the segments that are there when it begins.

`best_segments` runs the allocations in a model of the allocator, whose default settings
are assumed, and changes the segments by simulated annealing. The model has the pool of
blocks above 1 MiB only; smaller tensors are in a pool of their own.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from random import Random

_MIB = 1 << 20
_UNIT = 512
"""Bytes of which every block has a multiple."""

_EVENTS = 3_000_000
"""Allocations and frees to try in all, which take about two seconds."""

_FEWEST, _MOST = 100, 2000
"""Times to change the segments."""

_PASSES = 3
"""Steps after which the allocator has the segments that it needs."""

_TEMPERATURE = 0.02
"""Part of a step's bytes by which a change may be worse at first."""


def best_segments(
    allocations: Sequence[tuple[str, int]],
    nbytes: int,
    holes: Sequence[int],
    enough: float,
) -> list[int]:
    """Return the segments with the fewest bytes in which a step's tensors fit.

    Args:
        allocations: Names and bytes in order; 0 bytes frees a tensor.
        nbytes: The most bytes that are allocated at once.
        holes: Free blocks in segments of other tensors, which are not counted.
        enough: Bytes beyond `nbytes` with which the search ends.
    """
    pool = Pool(allocations, holes)
    best = pool.run([nbytes], math.inf) or []
    sizes = [size for size in pool.sizes if size >= 10 * _MIB]
    now, draw = best, Random(0)
    tries = min(_MOST, max(_FEWEST, _EVENTS // (2 * len(pool.events) + 1)))
    for turn in range(tries if best else 0):
        if sum(best) <= nbytes + enough:
            break
        # Simulated annealing: worse segments are accepted, ever less as turns pass.
        heat = _TEMPERATURE * (1 - turn / tries) ** 2 * nbytes
        limit = sum(now) + heat * draw.expovariate(1)
        found = pool.run(_changed(now, nbytes, sizes, draw), limit)
        if found is not None:
            now = found
            best = min(best, now, key=sum)
    return sorted(best, reverse=True)


def _changed(
    segments: Sequence[int], nbytes: int, sizes: Sequence[int], draw: Random
) -> list[int]:
    """Return segments of which a few were merged, divided, removed or resized.

    What is split off has the size of some large tensors together. A little more memory
    may save a whole tensor's, as the rest of a block that is not split is lost.
    """
    found = list(segments)
    spare = max(0, sum(found) - nbytes) + 4 * _MIB
    for _ in range(draw.choice((1, 1, 2, 3))):
        at, kind = draw.randrange(len(found)), draw.random()
        if kind < 0.25 and len(found) > 1:
            size = found.pop(at)
            found[draw.randrange(len(found))] += size
        elif kind < 0.5 and sizes:
            size = sum(draw.choice(sizes) for _ in range(draw.choice((1, 1, 2, 3))))
            if size < found[at]:
                found[at] -= size
                found.append(size)
        elif kind < 0.75 and len(found) > 1:
            del found[at]
        elif draw.random() < 0.7:
            less = int(draw.random() ** 3 * min(found[at], spare))
            found[at] = max(found[at] - less, 2 * _MIB)
        else:
            found[at] += int(draw.random() ** 3 * 0.05 * nbytes)
    return found


def _segment_bytes(size: int) -> int:
    """Return the bytes of the segment that is reserved for a block."""
    return 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB


class Pool:
    """A model of the allocator's pool of large blocks.

    Args:
        allocations: Names and bytes in order; 0 bytes frees a tensor.
        holes: Free blocks in segments of other tensors.

    Attributes:
        events: Number of a tensor and the bytes of its block, 0 to free it.
        sizes: All sizes of blocks.
    """

    def __init__(
        self, allocations: Sequence[tuple[str, int]], holes: Sequence[int]
    ) -> None:
        numbers: dict[str, int] = {}
        self.events: list[tuple[int, int]] = []
        for name, size in allocations:
            if size > _MIB:
                numbers[name] = len(self.events)
                self.events.append((numbers[name], -(-size // _UNIT) * _UNIT))
            elif not size and name in numbers:
                self.events.append((numbers.pop(name), 0))
        self.sizes = sorted({size for _, size in self.events if size})
        self._holes = holes

    def run(self, blocks: Sequence[int], limit: float) -> list[int] | None:
        """Return all segments once a step has run in some; None beyond the limit."""
        free: list[tuple[int, int]] = []  # sizes and addresses
        size_at: dict[int, int] = {}
        start_before: dict[int, int] = {}  # address behind a free block -> its own

        def take(address: int) -> int:
            size = size_at.pop(address)
            del start_before[address + size]
            del free[bisect_left(free, (size, address))]
            return size

        def release(address: int, size: int) -> None:
            if (before := start_before.get(address)) is not None:
                address, size = before, size + take(before)
            if address + size in size_at:
                size += take(address + size)
            size_at[address], start_before[address + size] = size, address
            insort(free, (size, address))

        segments = list(map(_segment_bytes, blocks))
        top, total = 0, sum(segments)
        for size in (*self._holes, *segments):
            release(top, size)
            top += size + _UNIT  # segments never merge
        for _ in range(_PASSES):
            if total > limit:
                return None
            before, live = total, dict[int, tuple[int, int]]()
            for number, size in self.events:
                if not size:
                    release(*live.pop(number))
                    continue
                if (at := bisect_left(free, (size, -1))) == len(free):
                    segments.append(_segment_bytes(size))
                    total += segments[-1]
                    if total > limit:
                        return None
                    release(top, segments[-1])
                    top += segments[-1] + _UNIT
                    at = bisect_left(free, (size, -1))
                address = free[at][1]
                whole = take(address)
                if whole - size > _MIB:
                    release(address + size, whole - size)
                    whole = size
                live[number] = address, whole
            for address, size in live.values():
                release(address, size)
            if total == before:
                break
        return segments
