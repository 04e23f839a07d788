"""Place intervals that may shrink in an arena of a given size.

A prefetch may begin later and an offload may be awaited earlier than a schedule wants;
only the time from the first use to the last is required. An interval for which there is
no gap over its whole wanted time gets the gap that keeps the longest part of it.
Intervals are placed one after another; those without any gap are placed earlier in the
next round (`squeaky_wheel`).
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mucudnn.passes.placement.squeaky_wheel import SqueakyWheel
from mucudnn.passes.scheduling.transfers import Clock

__all__ = ["Place", "Shrinkable", "place_shrinkable"]

_MOST_ROUNDS = 300
_WORK = 25_000
"""Limit of intervals placed in all rounds of one order."""

_BATCHES = 5
"""Number of turns in which the rounds of all orders are interleaved."""

_HOPELESS = 3.0
"""Factor on the fewest unplaced bytes so far at which a round is abandoned."""

_BUCKETS = 64

Positions = tuple[int, int]
"""First and last position."""

Row = tuple[int, int, int, int]
"""Start offset, end offset, first and last position."""


@dataclass(frozen=True, slots=True)
class Shrinkable:
    """An interval with a required part (uses) and a wanted part (copies included).

    Positions may be beyond the period or below zero, as a schedule is cyclic.

    Attributes:
        nbytes: Size in bytes.
        start: First wanted position.
        needed: First required position.
        last: Last required position.
        stop: Last wanted position.
    """

    nbytes: int
    start: int
    needed: int
    last: int
    stop: int

    @property
    def life(self) -> int:
        """Number of wanted positions."""
        return self.stop - self.start + 1


@dataclass(frozen=True, slots=True)
class Place:
    """Offset of an interval and the positions that remain of it."""

    offset: int
    start: int
    stop: int


_KEYS: tuple[Callable[[Shrinkable], tuple[float, ...]], ...] = (
    lambda b: (-(b.life**0.5) * b.nbytes,),
    lambda b: (-b.life * b.nbytes,),
    lambda b: (-b.life, -b.nbytes),
    lambda b: (-b.nbytes, b.needed - b.last),
)
"""Keys of the orders in which intervals are placed: by area, lifetime and size."""

_LARGE = 5000
"""Number of intervals above which only the first of these orders is tried."""


def place_shrinkable(
    intervals: Sequence[Shrinkable], limit: int, clock: Clock
) -> Iterator[list[Place]]:
    """Yield placements of all intervals, found from several orders."""
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
    """Return the first complete placement within a number of rounds."""
    for _ in range(rounds):
        places, left = attempt(wheel.order, _HOPELESS * wheel.least)
        if not left:
            return [place for place in places if place is not None]
        wheel.judge(sum(attempt.intervals[i].nbytes for i in left))
        wheel.reorder(left)
    return None


class _Attempt:
    """Greedy placement in a given order; for arguments see `place_shrinkable`."""

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
        """Return the place of each interval, and the intervals without a gap."""
        left: list[int] = []
        missing = 0
        found: list[Place | None] = [None] * len(self.intervals)
        occupied = _Occupied(self._period)
        for i in order:
            interval, whole, core = self.intervals[i], self._whole[i], self._core[i]
            near = occupied.during(whole)
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
                occupied.take(place.offset, interval.nbytes, ranges)
        return found, left

    def _shortened(
        self, interval: Shrinkable, core: Sequence[Positions], near: Sequence[Row]
    ) -> Place | None:
        """Return the place that keeps the most of an interval, the lowest of equals."""
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
        """Return the longest extent of an interval at an offset."""
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
        return self._clock.start(stop + 1) - self._clock.start(start)


class _Occupied:
    """Occupied bytes over time, sorted by offset, and bucketed by time for speed."""

    def __init__(self, period: int) -> None:
        self._rows: list[Row] = []
        self._width = 1 + period // _BUCKETS
        self._buckets: list[list[Row]] = [[] for _ in range(_BUCKETS + 1)]

    def take(self, offset: int, nbytes: int, ranges: Sequence[Positions]) -> None:
        """Occupy bytes at some positions."""
        for first, last in ranges:
            row = offset, offset + nbytes, first, last
            bisect.insort(self._rows, row)
            for bucket in range(first // self._width, last // self._width + 1):
                bisect.insort(self._buckets[bucket], row)

    def during(self, ranges: Sequence[Positions]) -> list[Row]:
        """Return the rows that overlap one or two ranges, by ascending offset."""
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
    """Wrap a range of positions into one period."""
    if last - first + 1 >= period:
        return ((0, period - 1),)
    start = first % period
    stop = start + last - first
    if stop < period:
        return ((start, stop),)
    return ((start, period - 1), (0, stop - period))


def _lowest(rows: Sequence[Row], nbytes: int) -> int:
    """Return the lowest sufficient gap between rows, or the end of the last row."""
    end = 0
    for low, high, _, _ in rows:
        if low - end >= nbytes:
            break
        if high > end:
            end = high
    return end


def _gaps(rows: Sequence[Row], nbytes: int, limit: int) -> list[tuple[int, int]]:
    """Return (start, end) offsets of sufficient gaps between rows."""
    found, end = [], 0
    for low, high, _, _ in rows:
        if low - end >= nbytes:
            found.append((end, low))
        if high > end:
            end = high
    if limit - end >= nbytes:
        found.append((end, limit))
    return found
