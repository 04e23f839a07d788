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

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
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
    best = pool.run([nbytes], 2 * nbytes + sum(size for _, size in pool.events)) or []
    sizes = [size for size in pool.sizes if size >= 10 * _MIB]
    now, draw = best, Random(0)
    tries = min(_MOST, max(_FEWEST, _EVENTS // (2 * len(pool.events) + 1)))
    for turn in range(tries if best else 0):
        if sum(best) <= nbytes + enough:
            break
        heat = _TEMPERATURE * (1 - turn / tries) ** 2 * nbytes
        limit = int(sum(now) + heat * draw.expovariate(1))
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


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    before: "_Block | None" = None
    behind: "_Block | None" = None
    free: bool = True


class Pool:
    """A model of the allocator's pool of large blocks.

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
                number = numbers[name] = len(self.events)
                self.events.append((number, -(-size // _UNIT) * _UNIT))
            elif not size and name in numbers:
                self.events.append((numbers.pop(name), 0))
        self.sizes = sorted({size for _, size in self.events if size})
        self._holes = holes

    def run(self, blocks: Sequence[int], limit: int) -> list[int] | None:
        """Return all segments once a step has run in some; None beyond the limit."""
        self._free: list[tuple[int, int]] = []
        self._at: dict[int, _Block] = {}
        top, segments = 0, []
        for size in self._holes:
            self._release(_Block(top, size))
            top += size
        for size in blocks:
            segments.append(_segment_bytes(size))
            self._release(_Block(top, segments[-1]))
            top += segments[-1]
        total = sum(segments)
        for _ in range(_PASSES):
            if total > limit:
                return None
            before, live = total, dict[int, _Block]()
            for number, size in self.events:
                if not size:
                    self._release(live.pop(number))
                    continue
                at = bisect_left(self._free, (size, -1))
                if at < len(self._free):
                    block = self._at[self._free.pop(at)[1]]
                else:
                    segments.append(_segment_bytes(size))
                    block = _Block(top, segments[-1])
                    top, total = top + segments[-1], total + segments[-1]
                    if total > limit:
                        return None
                live[number] = self._split(block, size)
            for block in live.values():
                self._release(block)
            if total == before:
                break
        return segments

    def _split(self, block: _Block, size: int) -> _Block:
        """Take a free block, of which the rest remains free if it is large enough."""
        block.free = False
        if (rest := block.size - size) > _MIB:
            behind = _Block(block.address + size, rest, block, block.behind)
            if block.behind is not None:
                block.behind.before = behind
            block.behind, block.size = behind, size
            self._at[behind.address] = behind
            insort(self._free, (rest, behind.address))
        return block

    def _release(self, block: _Block) -> None:
        """Free a block, and merge it with its free neighbors."""
        if (before := block.before) is not None and before.free:
            self._remove(before)
            before.size += block.size
            before.behind = block.behind
            if block.behind is not None:
                block.behind.before = before
            block = before
        if (behind := block.behind) is not None and behind.free:
            self._remove(behind)
            block.size += behind.size
            block.behind = behind.behind
            if behind.behind is not None:
                behind.behind.before = block
        block.free = True
        self._at[block.address] = block
        insort(self._free, (block.size, block.address))

    def _remove(self, block: _Block) -> None:
        del self._free[bisect_left(self._free, (block.size, block.address))]
