"""Ledger of the bytes in use at every node of a step."""

from collections.abc import Iterator, Sequence

from mucudnn.passes.liveness import Use, uses_of

__all__ = ["Occupancy", "Use", "uses_of"]

_WIDTH = 32
"""Number of positions per chunk of a ledger."""


class Occupancy:
    """Ledger of bytes at every node position.

    Positions are cyclic: those beyond the last belong to the next step, negative ones
    to the step before. Positions are stored in chunks with their maxima, so that
    operations on long ranges are cheap.
    """

    def __init__(self, workspaces: Sequence[int], budget: float) -> None:
        self._bytes = list(workspaces)
        self.budget = budget
        chunks = range(0, len(self._bytes), _WIDTH)
        self._most = [max(self._bytes[at : at + _WIDTH]) for at in chunks]
        self._everywhere = [0] * len(chunks)

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, position: int) -> int:
        at = position % len(self._bytes)
        return self._bytes[at] + self._everywhere[at // _WIDTH]

    def add(self, start: int, stop: int, nbytes: int) -> None:
        """Add `nbytes` at every position from `start` to `stop` (inclusive)."""
        if not nbytes or start > stop:
            return
        if start >= 0 and stop < len(self._bytes):
            self._add(start, stop, nbytes)
            return
        for first, last in self._in_step(start, stop):
            self._add(first, last, nbytes)

    def _add(self, first: int, last: int, nbytes: int) -> None:
        low, high = first // _WIDTH, last // _WIDTH
        if low == high:
            self._add_within(low, first, last, nbytes)
            return
        self._add_within(low, first, (low + 1) * _WIDTH - 1, nbytes)
        if high - low > 1:
            whole = slice(low + 1, high)
            self._most[whole] = [used + nbytes for used in self._most[whole]]
            self._everywhere[whole] = [n + nbytes for n in self._everywhere[whole]]
        self._add_within(high, high * _WIDTH, last, nbytes)

    def _add_within(self, chunk: int, first: int, last: int, nbytes: int) -> None:
        now = [used + nbytes for used in self._bytes[first : last + 1]]
        self._bytes[first : last + 1] = now
        if nbytes < 0:  # the maximum may have been in this range
            now = self._bytes[chunk * _WIDTH : (chunk + 1) * _WIDTH]
            self._most[chunk] = max(now) + self._everywhere[chunk]
            return
        most = max(now) + self._everywhere[chunk]
        if most > self._most[chunk]:
            self._most[chunk] = most

    def fits(self, position: int, nbytes: int) -> bool:
        """Return whether `nbytes` more fit at one position."""
        return self[position] + nbytes <= self.budget

    def fits_over(self, start: int, stop: int, nbytes: int) -> bool:
        """Return whether `nbytes` more fit from `start` to `stop` (inclusive)."""
        if start > stop:
            return True
        if start < 0 or stop >= len(self._bytes):
            return self.room_after(start - 1, stop, nbytes) >= stop
        room, low, high = self.budget - nbytes, start // _WIDTH, stop // _WIDTH
        if high - low > 1 and max(self._most[low + 1 : high]) > room:
            return False
        return all(
            self._most[chunk] <= room
            or max(self._bytes[first : last + 1]) + self._everywhere[chunk] <= room
            for chunk, first, last in (
                (low, start, min(stop, low * _WIDTH + _WIDTH - 1)),
                (high, max(start, high * _WIDTH), stop),
            )
        )

    def room_before(self, position: int, floor: int, nbytes: int) -> int:
        """Return the first position of the free range right before `position`.

        The range has room for `nbytes` more and does not go below `floor`. If it is
        empty, the result is `position`.
        """
        room, count = self.budget - nbytes, len(self._bytes)
        while position > floor:
            at = (position - 1) % count
            chunk = at // _WIDTH
            end = max(floor, position - 1 - (at - chunk * _WIDTH))
            if self._most[chunk] <= room:
                position = end
                continue
            rest = room - self._everywhere[chunk]
            while position > end:
                if self._bytes[at] > rest:
                    return position
                at -= 1
                position -= 1
        return position

    def room_after(self, position: int, ceiling: int, nbytes: int) -> int:
        """Return the last position of the free range right after `position`.

        The range has room for `nbytes` more and does not go above `ceiling`. If it is
        empty, the result is `position`.
        """
        room, count = self.budget - nbytes, len(self._bytes)
        while position < ceiling:
            at = (position + 1) % count
            chunk = at // _WIDTH
            last = min((chunk + 1) * _WIDTH, count) - 1
            end = min(ceiling, position + 1 + last - at)
            if self._most[chunk] <= room:
                position = end
                continue
            rest = room - self._everywhere[chunk]
            while position < end:
                if self._bytes[at] > rest:
                    return position
                at += 1
                position += 1
        return position

    def peak(self) -> tuple[int, int]:
        """Return the maximum and its first position; (0, 0) if empty."""
        if not self._bytes:
            return 0, 0
        most = max(self._most)
        chunk = self._most.index(most)
        start = chunk * _WIDTH
        within = self._bytes[start : start + _WIDTH]
        return most, start + within.index(most - self._everywhere[chunk])

    def _in_step(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the inclusive ranges of one step that a cyclic range covers."""
        n = len(self._bytes)
        if start > stop:
            return
        first = start % n
        last = first + stop - start
        yield first, min(last, n - 1)
        if last >= n:
            yield 0, last - n
