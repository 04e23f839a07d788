"""Places in an arena of a given size, for blocks whose lives may be shortened.

A copy back may begin later and a copy out may be waited for sooner than a schedule
would like: what must be there is only the time from the first use to the last. So
where a whole life finds no gap, a block takes the gap that leaves it most of what is
worth having. Blocks are placed one after the other; those that find no gap at all come
earlier in the next round (squeaky wheel optimisation, Joslin & Clements 1999).
"""

import bisect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mucudnn.passes.scheduling.transfers import Clock

__all__ = ["Elastic", "Place", "place_elastic"]

_MOST_ROUNDS = 300
_WORK = 25_000
"""Blocks that all rounds of one order may place together."""

_BATCHES = 5
"""How often each order has its turn."""

_HOPELESS = 3.0
"""Times the fewest bytes left over so far at which a round is given up."""

_RETURN = 0.1
_BUCKETS = 64

Span = tuple[int, int]
Row = tuple[int, int, int, int]
"""Offset, its end, first and last position."""


@dataclass(frozen=True, slots=True)
class Elastic:
    """Bytes that are needed for some time and wanted for longer.

    Positions may lie beyond the period or below zero: time goes round.

    Attributes:
        nbytes: Its size.
        start: First position that it is wanted for.
        needed: First position that it is needed for.
        last: Last position that it is needed for.
        stop: Last position that it is wanted for.
    """

    nbytes: int
    start: int
    needed: int
    last: int
    stop: int

    @property
    def life(self) -> int:
        """How many positions it is wanted for."""
        return self.stop - self.start + 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block lies and for how long."""

    offset: int
    start: int
    stop: int

    @property
    def life(self) -> int:
        """How many positions it is there for."""
        return self.stop - self.start + 1


_KEYS: tuple[Callable[[Elastic], tuple[float, ...]], ...] = (
    lambda b: (-(b.life**0.5) * b.nbytes,),
    lambda b: (-b.life * b.nbytes,),
    lambda b: (-b.life, -b.nbytes),
    lambda b: (-b.nbytes, b.needed - b.last),
)
"""Which block is placed first: those of large area, the long-lived, the large."""

_LARGE = 5000
"""Blocks from which on only the first of these orders is tried."""


def place_elastic(
    blocks: Sequence[Elastic], limit: int, clock: Clock, period: int
) -> Iterator[list[Place]]:
    """Places for all blocks, found in several ways.

    Args:
        blocks: To be placed.
        limit: Size of the arena.
        clock: When positions are.
        period: Positions after which everything begins again.
    """
    rounds = min(_MOST_ROUNDS, 1 + _WORK // max(1, len(blocks)))
    batch = max(1, rounds // _BATCHES)
    attempt = _Attempt(blocks, limit, clock, period)
    keys = _KEYS[:1] if len(blocks) > _LARGE else _KEYS
    ranks = ([key(block) for block in blocks] for key in keys)
    wheels = [
        _Wheel(attempt, sorted(range(len(blocks)), key=rank.__getitem__))
        for rank in ranks
    ]
    for _ in range(0, rounds, batch):
        found = False
        for wheel in wheels:
            turns = (wheel.turn() for _ in range(batch))
            places = next((places for places in turns if places is not None), None)
            if places is not None:
                found = True
                yield places
        if found:
            return


class _Wheel:
    """Again and again with the blocks that found no place earlier in the order.

    How much earlier is left to chance, and now and then the search returns to the best
    order so far: without that it goes round in circles.

    Args:
        attempt: Places blocks in an order.
        order: The first one.
    """

    def __init__(self, attempt: "_Attempt", order: list[int]) -> None:
        self._attempt = attempt
        self._order = order
        self._best_order = order
        self._least = math.inf
        self._chance = random.Random(0)

    def turn(self) -> list[Place] | None:
        """Places for all blocks, if there are any in this order; then the next one."""
        chance, blocks = self._chance.random, self._attempt.blocks
        places, left = self._attempt(self._order, _HOPELESS * self._least)
        if not left:
            return [place for place in places if place is not None]
        nbytes = sum(blocks[i].nbytes for i in left)
        if nbytes <= self._least:
            self._least, self._best_order = nbytes, self._order
        elif chance() < _RETURN:
            self._order = self._best_order
        rank = {i: r + 1.0 for r, i in enumerate(self._order)}
        for i in left:
            rank[i] *= chance()
        self._order = sorted(self._order, key=rank.__getitem__)
        return None


class _Attempt:
    """Places blocks in a given order.

    Args:
        blocks: To be placed.
        limit: Size of the arena.
        clock: When positions are.
        period: Positions after which everything begins again.
    """

    def __init__(
        self, blocks: Sequence[Elastic], limit: int, clock: Clock, period: int
    ) -> None:
        self.blocks = blocks
        self._limit = limit
        self._clock = clock
        self._period = period
        self._whole = [_spans(b.start, b.stop, period) for b in blocks]
        self._core = [_spans(b.needed, b.last, period) for b in blocks]

    def __call__(
        self, order: Sequence[int], hopeless: float
    ) -> tuple[list[Place | None], list[int]]:
        """A place a block, in the order of the blocks, and those that found no gap.

        Args:
            order: In which blocks are placed.
            hopeless: Bytes without a place at which to give up.
        """
        left: list[int] = []
        missing = 0
        found: list[Place | None] = [None] * len(self.blocks)
        taken = _Taken(self._period)
        for i in order:
            block, whole, core = self.blocks[i], self._whole[i], self._core[i]
            near = taken.during(whole)
            offset = _lowest(near, block.nbytes)
            if offset + block.nbytes <= self._limit:
                found[i] = Place(offset, block.start, block.stop)
            elif core != whole:
                found[i] = self._shortened(block, core, near)
            place = found[i]
            if place is None:
                left.append(i)
                missing += block.nbytes
                if missing > hopeless:
                    break
            else:
                spans = _spans(place.start, place.stop, self._period)
                taken.take(place.offset, block.nbytes, spans)
        return found, left

    def _shortened(
        self, block: Elastic, core: Sequence[Span], near: Sequence[Row]
    ) -> Place | None:
        """The place that leaves most of a block's life, the lowest of equal ones."""
        hard: list[Row] = []
        soft: list[Row] = []
        for row in near:
            meets = any(row[2] <= last and first <= row[3] for first, last in core)
            (hard if meets else soft).append(row)
        most = self._worth(block.start, block.stop)
        best: Place | None = None
        best_worth = -1.0
        for low, high in _gaps(hard, block.nbytes, self._limit):
            offsets = {low, high - block.nbytes}
            offsets.update(
                end for _, end, _, _ in soft if low <= end <= high - block.nbytes
            )
            for offset in sorted(offsets):
                start, stop = self._extent(block, offset, soft)
                worth = self._worth(start, stop)
                if worth > best_worth:
                    best, best_worth = Place(offset, start, stop), worth
                if worth >= most:
                    return best
        return best

    def _extent(self, block: Elastic, offset: int, soft: Sequence[Row]) -> Span:
        """How long a block can be there, with others before and after it."""
        start, stop, end = block.start, block.stop, offset + block.nbytes
        inside = start >= 0 and stop < self._period
        turns = (0,) if inside else (-self._period, 0, self._period)
        for low, high, first, last in soft:
            if low < end and offset < high:
                for turn in turns:
                    if start <= last + turn < block.needed:
                        start = last + turn + 1
                    if block.last < first + turn <= stop:
                        stop = first + turn - 1
        return start, stop

    def _worth(self, start: int, stop: int) -> float:
        """Time that a block is there for, in ms."""
        return self._clock.start(stop + 1) - self._clock.start(start)


class _Taken:
    """Bytes that are taken and when, in order of their offsets.

    Rows are also kept by when they are, so that short lives meet few of them.
    """

    def __init__(self, period: int) -> None:
        self._rows: list[Row] = []
        self._width = 1 + period // _BUCKETS
        self._buckets: list[list[Row]] = [[] for _ in range(_BUCKETS + 1)]

    def take(self, offset: int, nbytes: int, spans: Sequence[Span]) -> None:
        """Take bytes over some spans."""
        for first, last in spans:
            row = offset, offset + nbytes, first, last
            bisect.insort(self._rows, row)
            for bucket in range(first // self._width, last // self._width + 1):
                bisect.insort(self._buckets[bucket], row)

    def during(self, spans: Sequence[Span]) -> list[Row]:
        """What is taken at any time in one or two spans, ascending."""
        if len(spans) == 1:
            ((first, last),) = spans
            bucket = first // self._width
            narrow = last // self._width == bucket
            rows = self._buckets[bucket] if narrow else self._rows
            return [row for row in rows if row[2] <= last and first <= row[3]]
        (first, last), (begin, end) = spans
        return [
            row
            for row in self._rows
            if (row[2] <= last and first <= row[3])
            or (row[2] <= end and begin <= row[3])
        ]


def _spans(first: int, last: int, period: int) -> tuple[Span, ...]:
    """Positions of one period that those from `first` to `last` are like."""
    if last - first + 1 >= period:
        return ((0, period - 1),)
    start = first % period
    stop = start + last - first
    if stop < period:
        return ((start, stop),)
    return ((start, period - 1), (0, stop - period))


def _lowest(rows: Sequence[Row], nbytes: int) -> int:
    """The lowest offset of a gap between rows, or where the last of them ends."""
    end = 0
    for low, high, _, _ in rows:
        if low - end >= nbytes:
            break
        if high > end:
            end = high
    return end


def _gaps(rows: Sequence[Row], nbytes: int, limit: int) -> list[Span]:
    """Gaps between rows that are large enough."""
    found, end = [], 0
    for low, high, _, _ in rows:
        if low - end >= nbytes:
            found.append((end, low))
        if high > end:
            end = high
    if limit - end >= nbytes:
        found.append((end, limit))
    return found
