"""Free memory, and allocation of a tensor in one or several pieces.

A tensor in several pieces is contiguous by virtual address (`page_table`) if all its
inner boundaries are chunk boundaries: the tail of one chunk, then whole chunks from
anywhere, then the head of another. Only free bytes in the middle of a chunk, and unused
heads and tails, are lost to fragmentation.
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mucudnn.passes.placement.page_table import Extent, joined

__all__ = ["FreeMemory"]


class _Ends(NamedTuple):
    """Free extents by their position in chunks.

    Attributes:
        tails: Free ends of chunks that are not entirely free.
        runs: Runs of consecutive free chunks.
        heads: Free beginnings of chunks that are not entirely free.
    """

    tails: list[Extent]
    runs: list[Extent]
    heads: list[Extent]


class FreeMemory:
    """Free extents at one time."""

    def __init__(self, extents: Sequence[Extent], chunk_bytes: int) -> None:
        self._free = extents
        self._chunk = chunk_bytes

    @classmethod
    def between(
        cls, taken: Iterable[Extent], end: int, chunk_bytes: int
    ) -> "FreeMemory":
        """Return the free memory below `end` beside taken extents, in any order."""
        free, start = [], 0
        for low, high in (*sorted(taken), (end, end)):
            if low > start:
                free.append(Extent(start, low))
            start = max(start, high)
        return cls(free, chunk_bytes)

    @property
    def most(self) -> int:
        """Bytes of the largest tensor that fits."""
        ends = self._ends()
        chunks = sum(map(_size, ends.runs))
        scattered = _longest(ends.tails) + chunks + _longest(ends.heads)
        return max(_longest(self._free), scattered)

    def find(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Return the tightest free extent for a tensor, or several, or None."""
        if nbytes == 0:
            return (Extent(0, 0),)
        fitting = [e for e in self._free if _size(e) >= nbytes]
        if fitting:
            low = min(fitting, key=_size).start
            return (Extent(low, low + nbytes),)
        return self._scattered(nbytes)

    def _scattered(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Return a tail, as few whole chunks as possible, and a head."""
        tails, runs, heads = self._ends()
        left = nbytes - _longest(tails) - _longest(heads)
        whole = max(0, -(-left // self._chunk)) * self._chunk
        if whole > sum(map(_size, runs)):
            return None
        rest = max(0, nbytes - whole)
        tail, head = _tightest(tails, heads, rest)
        first = min(rest, _size(tail))
        found = [Extent(tail.stop - first, tail.stop)]
        found += _take_from_runs(runs, nbytes - rest)
        found.append(Extent(head.start, head.start + rest - first))
        return joined(piece for piece in found if _size(piece))

    def _ends(self) -> _Ends:
        found = _Ends([], [], [])
        for start, stop in self._free:
            low = -(-start // self._chunk) * self._chunk
            high = stop // self._chunk * self._chunk
            if low > high:  # in the middle of a chunk
                continue
            if start < low:
                found.tails.append(Extent(start, low))
            if low < high:
                found.runs.append(Extent(low, high))
            if high < stop:
                found.heads.append(Extent(high, stop))
        return found


def _size(extent: Extent) -> int:
    return extent.stop - extent.start


def _longest(extents: Iterable[Extent]) -> int:
    return max(map(_size, extents), default=0)


def _take_from_runs(runs: Iterable[Extent], nbytes: int) -> Iterator[Extent]:
    """Yield `nbytes` of whole chunks, longest runs first; the last may be partial."""
    for run in sorted(runs, key=_size, reverse=True):
        if not nbytes:
            return
        taken = min(nbytes, _size(run))
        nbytes -= taken
        yield Extent(run.start, run.start + taken)


def _tightest(
    tails: Iterable[Extent], heads: Iterable[Extent], nbytes: int
) -> tuple[Extent, Extent]:
    """Return the tightest tail and head (possibly empty) that hold `nbytes`."""
    nothing = Extent(0, 0)
    sized = sorted((_size(e), e) for e in (nothing, *heads))
    found = []
    for tail in (nothing, *tails):
        at = bisect.bisect_left(sized, (nbytes - _size(tail), nothing))
        if at < len(sized):
            found.append((_size(tail) + sized[at][0], tail, sized[at][1]))
    _, tail, head = min(found)
    return tail, head
