"""Places in an arena of a given size, for intervals that may shrink.

A copy back may begin later and a copy out may be waited for sooner than a schedule
would like: what must be there is only the time from the first use to the last. So
where a whole interval finds no free gap, it takes the gap that leaves it most of what
is worth having. Intervals are placed one after the other; those that find no gap at all
come earlier in the next round (`squeaky_wheel`).
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mucudnn.passes.placement.squeaky_wheel import SqueakyWheel
from mucudnn.passes.scheduling.transfers import Clock

__all__ = ["Place", "Shrinkable", "place_shrinkable"]

_MOST_ROUNDS = 300
_WORK = 25_000
"""Intervals that all rounds of one order may place together."""

_BATCHES = 5
"""How often each order is gone on with."""

_HOPELESS = 3.0
"""Times the fewest bytes left over so far at which a round is given up."""

_BUCKETS = 64

Positions = tuple[int, int]
"""First and last."""

Row = tuple[int, int, int, int]
"""Offset, its end, first and last position."""


@dataclass(frozen=True, slots=True)
class Shrinkable:
    """Bytes that are needed for some time and wanted for longer.

    Positions may lie beyond the period or below zero: a schedule is cyclic.

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
    """Where an interval lies and for how long."""

    offset: int
    start: int
    stop: int


_KEYS: tuple[Callable[[Shrinkable], tuple[float, ...]], ...] = (
    lambda b: (-(b.life**0.5) * b.nbytes,),
    lambda b: (-b.life * b.nbytes,),
    lambda b: (-b.life, -b.nbytes),
    lambda b: (-b.nbytes, b.needed - b.last),
)
"""Which interval is placed first: those of large area, the long-lived, the large."""

_LARGE = 5000
"""Intervals from which on only the first of these orders is tried."""


def place_shrinkable(
    intervals: Sequence[Shrinkable], limit: int, clock: Clock
) -> Iterator[list[Place]]:
    """Places for all intervals, found in several ways.

    Args:
        intervals: To be placed.
        limit: Size of the arena.
        clock: When positions are, and after how many everything begins again.
    """
    rounds = min(_MOST_ROUNDS, 1 + _WORK // max(1, len(intervals)))
    batch = max(1, rounds // _BATCHES)
    attempt = _Attempt(intervals, limit, clock)
    keys = _KEYS[:1] if len(intervals) > _LARGE else _KEYS
    ranks = ([key(interval) for interval in intervals] for key in keys)
    wheels = [
        SqueakyWheel(sorted(range(len(intervals)), key=rank.__getitem__))
        for rank in ranks
    ]
    for _ in range(0, rounds, batch):
        found = False
        for wheel in wheels:
            places = _first_of(attempt, wheel, batch)
            if places is not None:
                found = True
                yield places
        if found:
            return


def _first_of(
    attempt: "_Attempt", wheel: SqueakyWheel, rounds: int
) -> list[Place] | None:
    """The places of the first order, of so many, in which nothing is left over."""
    for _ in range(rounds):
        places, left = attempt(wheel.order, _HOPELESS * wheel.least)
        if not left:
            return [place for place in places if place is not None]
        wheel.judge(sum(attempt.intervals[i].nbytes for i in left))
        wheel.reorder(left)
    return None


class _Attempt:
    """Places intervals in a given order; the arguments are `place_shrinkable`'s."""

    def __init__(
        self, intervals: Sequence[Shrinkable], limit: int, clock: Clock
    ) -> None:
        self.intervals = intervals
        self._limit = limit
        self._clock = clock
        self._period = period = clock.count
        self._whole = [_in_period(b.start, b.stop, period) for b in intervals]
        self._core = [_in_period(b.needed, b.last, period) for b in intervals]

    def __call__(
        self, order: Sequence[int], hopeless: float
    ) -> tuple[list[Place | None], list[int]]:
        """A place for each interval, in order, and those that found no free gap.

        Args:
            order: In which they are placed.
            hopeless: Bytes without a place at which to give up.
        """
        left: list[int] = []
        missing = 0
        found: list[Place | None] = [None] * len(self.intervals)
        taken = _Taken(self._period)
        for i in order:
            interval, whole, core = self.intervals[i], self._whole[i], self._core[i]
            near = taken.during(whole)
            offset = _lowest(near, interval.nbytes)
            if offset + interval.nbytes <= self._limit:
                found[i] = Place(offset, interval.start, interval.stop)
            elif core != whole:
                found[i] = self._shortened(interval, core, near)
            place = found[i]
            if place is None:
                left.append(i)
                missing += interval.nbytes
                if missing > hopeless:
                    break
            else:
                ranges = _in_period(place.start, place.stop, self._period)
                taken.take(place.offset, interval.nbytes, ranges)
        return found, left

    def _shortened(
        self, interval: Shrinkable, core: Sequence[Positions], near: Sequence[Row]
    ) -> Place | None:
        """The place that leaves most of an interval, the lowest of equal ones."""
        hard: list[Row] = []
        soft: list[Row] = []
        for row in near:
            meets = any(row[2] <= last and first <= row[3] for first, last in core)
            (hard if meets else soft).append(row)
        most = self._worth(interval.start, interval.stop)
        best: Place | None = None
        best_worth = -1.0
        for low, high in _gaps(hard, interval.nbytes, self._limit):
            offsets = {low, high - interval.nbytes}
            offsets.update(
                end for _, end, _, _ in soft if low <= end <= high - interval.nbytes
            )
            for offset in sorted(offsets):
                start, stop = self._extent(interval, offset, soft)
                worth = self._worth(start, stop)
                if worth > best_worth:
                    best, best_worth = Place(offset, start, stop), worth
                if worth >= most:
                    return best
        return best

    def _extent(
        self, interval: Shrinkable, offset: int, soft: Sequence[Row]
    ) -> Positions:
        """How long an interval can be there, with others before and after it."""
        start, stop, end = interval.start, interval.stop, offset + interval.nbytes
        inside = start >= 0 and stop < self._period
        shifts = (0,) if inside else (-self._period, 0, self._period)
        for low, high, first, last in soft:
            if low < end and offset < high:
                for shift in shifts:
                    if start <= last + shift < interval.needed:
                        start = last + shift + 1
                    if interval.last < first + shift <= stop:
                        stop = first + shift - 1
        return start, stop

    def _worth(self, start: int, stop: int) -> float:
        """How long an interval is there, in ms."""
        return self._clock.start(stop + 1) - self._clock.start(start)


class _Taken:
    """Bytes that are taken and when, in order of their offsets.

    Rows are also kept by when they are, so that short lives meet few of them.
    """

    def __init__(self, period: int) -> None:
        self._rows: list[Row] = []
        self._width = 1 + period // _BUCKETS
        self._buckets: list[list[Row]] = [[] for _ in range(_BUCKETS + 1)]

    def take(self, offset: int, nbytes: int, ranges: Sequence[Positions]) -> None:
        """Take bytes at some positions."""
        for first, last in ranges:
            row = offset, offset + nbytes, first, last
            bisect.insort(self._rows, row)
            for bucket in range(first // self._width, last // self._width + 1):
                bisect.insort(self._buckets[bucket], row)

    def during(self, ranges: Sequence[Positions]) -> list[Row]:
        """What is taken at any time in one or two ranges, ascending."""
        if len(ranges) == 1:
            ((first, last),) = ranges
            bucket = first // self._width
            narrow = last // self._width == bucket
            rows = self._buckets[bucket] if narrow else self._rows
            return [row for row in rows if row[2] <= last and first <= row[3]]
        (first, last), (begin, end) = ranges
        return [
            row
            for row in self._rows
            if (row[2] <= last and first <= row[3])
            or (row[2] <= end and begin <= row[3])
        ]


def _in_period(first: int, last: int, period: int) -> tuple[Positions, ...]:
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


def _gaps(rows: Sequence[Row], nbytes: int, limit: int) -> list[tuple[int, int]]:
    """Offsets and ends of the gaps between rows that are large enough."""
    found, end = [], 0
    for low, high, _, _ in rows:
        if low - end >= nbytes:
            found.append((end, low))
        if high > end:
            end = high
    if limit - end >= nbytes:
        found.append((end, limit))
    return found
