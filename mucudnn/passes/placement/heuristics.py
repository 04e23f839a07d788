"""Allocation heuristics: greedy assignment of offsets to blocks, without backtracking.

Each heuristic returns one offset per block, in the order of the given blocks.
"""

import bisect
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["Block", "by_time", "in_gaps", "on_top"]

_NOTHING: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Block:
    """A number of bytes with an inclusive live range."""

    name: str
    nbytes: int
    first: int
    last: int


def by_time(blocks: Sequence[Block], *, best_fit: bool) -> list[int]:
    """Place blocks by start time like a runtime allocator, in free gaps or at the top.

    Of blocks that start together, the one that lives longest comes first.
    """
    order = sorted(range(len(blocks)), key=lambda i: (blocks[i].first, -blocks[i].last))
    offsets = [0] * len(blocks)
    living: list[tuple[int, int]] = []
    gaps: list[tuple[int, int]] = []
    top = 0
    for i in order:
        block = blocks[i]
        while living and living[0][0] < block.first:
            _, expired = heapq.heappop(living)
            top = _release(gaps, offsets[expired], blocks[expired].nbytes, top)
        fitting = [g for g in range(len(gaps)) if gaps[g][1] >= block.nbytes]
        if fitting:
            chosen = min(fitting, key=lambda g: gaps[g][1]) if best_fit else fitting[0]
            offset, size = gaps[chosen]
            rest = (offset + block.nbytes, size - block.nbytes)
            gaps[chosen : chosen + 1] = [rest] if rest[1] else []
        else:
            offset, top = top, top + block.nbytes
        offsets[i] = offset
        heapq.heappush(living, (block.last, i))
    return offsets


def _release(gaps: list[tuple[int, int]], offset: int, nbytes: int, top: int) -> int:
    """Add a free gap, merged with its neighbours; return the end of used memory."""
    at = bisect.bisect(gaps, (offset, 0))
    if at < len(gaps) and gaps[at][0] == offset + nbytes:
        nbytes += gaps.pop(at)[1]
    if at > 0 and sum(gaps[at - 1]) == offset:
        at -= 1
        offset, before = gaps.pop(at)
        nbytes += before
    if offset + nbytes == top:
        return offset
    gaps.insert(at, (offset, nbytes))
    return top


def on_top(
    blocks: Sequence[Block],
    order: Sequence[int],
    fixed: Mapping[int, int] = _NOTHING,
) -> list[int]:
    """Place each block above all placed blocks that are alive at the same time.

    Gaps below are lost, but a segment tree makes a block cost only logarithmic time.
    """
    moments = sorted({b.first for b in blocks} | {b.last for b in blocks})
    index = {moment: i for i, moment in enumerate(moments)}
    heights = _Heights(len(moments))
    offsets = [fixed.get(i, 0) for i in range(len(blocks))]
    for i in (*fixed, *order):
        first, last = index[blocks[i].first], index[blocks[i].last]
        if i not in fixed:
            offsets[i] = heights.highest(first, last)
        heights.raise_to(first, last, offsets[i] + blocks[i].nbytes)
    return offsets


class _Heights:
    """Segment tree of heights over time, with range maximum and range raise.

    A node's mark applies to all moments below the node and is not pushed down; its peak
    is the maximum of the subtree.
    """

    def __init__(self, moments: int) -> None:
        self._size = max(1, moments)
        self._mark = [0] * (2 * self._size)
        self._peak = [0] * (2 * self._size)

    def _cover(self, first: int, last: int) -> list[int]:
        low, high = first + self._size, last + self._size + 1
        nodes = []
        while low < high:
            if low & 1:
                nodes.append(low)
                low += 1
            if high & 1:
                high -= 1
                nodes.append(high)
            low >>= 1
            high >>= 1
        return nodes

    def highest(self, first: int, last: int) -> int:
        """Return the largest height in a range of moments."""
        found = 0
        for node in self._cover(first, last):
            found = max(found, self._peak[node])
            while node > 1:
                node >>= 1
                found = max(found, self._mark[node])
        return found

    def raise_to(self, first: int, last: int, height: int) -> None:
        """Raise every height in a range of moments to at least `height`."""
        for node in self._cover(first, last):
            self._mark[node] = max(self._mark[node], height)
            while node >= 1:
                self._peak[node] = max(self._peak[node], height)
                node >>= 1


def in_gaps(
    blocks: Sequence[Block],
    order: Sequence[int],
    limit: float = math.inf,
    fixed: Mapping[int, int] = _NOTHING,
) -> list[int]:
    """Place each block at the lowest offset that is free during its whole life.

    Blocks that would end above the limit get the offset -1.
    """
    offsets = [fixed.get(i, -1) for i in range(len(blocks))]
    placed = sorted(
        (offset, offset + blocks[i].nbytes, blocks[i].first, blocks[i].last)
        for i, offset in fixed.items()
    )
    for i in order:
        block = blocks[i]
        first, last, nbytes = block.first, block.last, block.nbytes
        end = 0
        for low, high, begins, ends in placed:
            if begins <= last and first <= ends:
                if low - end >= nbytes:
                    break
                if high > end:
                    end = high
        if end + nbytes <= limit:
            offsets[i] = end
            bisect.insort(placed, (end, end + nbytes, first, last))
    return offsets
