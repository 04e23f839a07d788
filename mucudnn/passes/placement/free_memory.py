"""What of the memory is free, and bytes of it for a tensor: in one piece or in several.

A tensor in several pieces is in one piece by address (`page_table`), where all of its
inner ends are ends of chunks: the end of one chunk, then whole ones from anywhere, then
the beginning of another. So nothing is lost but what is free in the middle of a chunk,
and ends that are left over.
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mucudnn.passes.placement.page_table import Extent, joined

__all__ = ["FreeMemory"]


class _Ends(NamedTuple):
    """What is free, as chunks have it.

    Attributes:
        tails: Bytes before the end of a chunk that is not free as a whole.
        runs: Whole chunks, in a row.
        heads: Bytes behind the beginning of a chunk that is not free as a whole.
    """

    tails: list[Extent]
    runs: list[Extent]
    heads: list[Extent]


class FreeMemory:
    """What is free at some time.

    Args:
        extents: In order, none of them next to another.
        chunk_bytes: Size of the chunks that can be mapped anywhere.
    """

    def __init__(self, extents: Sequence[Extent], chunk_bytes: int) -> None:
        self._free = extents
        self._chunk = chunk_bytes

    @classmethod
    def between(
        cls, taken: Iterable[Extent], end: int, chunk_bytes: int
    ) -> "FreeMemory":
        """What is left of so many bytes beside what is taken, in any order."""
        free, start = [], 0
        for low, high in (*sorted(taken), (end, end)):
            if low > start:
                free.append(Extent(start, low))
            start = max(start, high)
        return cls(free, chunk_bytes)

    @property
    def most(self) -> int:
        """Bytes of the largest tensor that there is room for."""
        ends = self._ends()
        chunks = sum(map(_size, ends.runs))
        scattered = _longest(ends.tails) + chunks + _longest(ends.heads)
        return max(_longest(self._free), scattered)

    def find(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Free bytes for a tensor: the tightest piece, or several; None without any."""
        if nbytes == 0:
            return (Extent(0, 0),)
        fitting = [e for e in self._free if _size(e) >= nbytes]
        if fitting:
            low = min(fitting, key=_size).start
            return (Extent(low, low + nbytes),)
        return self._scattered(nbytes)

    def _scattered(self, nbytes: int) -> tuple[Extent, ...] | None:
        """A tail, whole chunks and a head, as few of the whole chunks as will do."""
        tails, runs, heads = self._ends()
        left = nbytes - _longest(tails) - _longest(heads)
        whole = max(0, -(-left // self._chunk)) * self._chunk
        if whole > sum(map(_size, runs)):
            return None
        rest = max(0, nbytes - whole)
        tail, head = _tightest(tails, heads, rest)
        first = min(rest, _size(tail))
        found = [Extent(tail.stop - first, tail.stop)]
        found += _of_runs(runs, nbytes - rest)
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


def _of_runs(runs: Iterable[Extent], nbytes: int) -> Iterator[Extent]:
    """So many bytes of whole chunks, of the longest runs first; of the last a part.

    The end of what is taken may be within a chunk.
    """
    for run in sorted(runs, key=_size, reverse=True):
        if not nbytes:
            return
        taken = min(nbytes, _size(run))
        nbytes -= taken
        yield Extent(run.start, run.start + taken)


def _tightest(
    tails: Iterable[Extent], heads: Iterable[Extent], nbytes: int
) -> tuple[Extent, Extent]:
    """A tail and a head, or one or none of them, that hold so many bytes together.

    Of all that do, those with the least over.
    """
    nothing = Extent(0, 0)
    sized = sorted((_size(e), e) for e in (nothing, *heads))
    found = []
    for tail in (nothing, *tails):
        at = bisect.bisect_left(sized, (nbytes - _size(tail), nothing))
        if at < len(sized):
            found.append((_size(tail) + sized[at][0], tail, sized[at][1]))
    _, tail, head = min(found)
    return tail, head
