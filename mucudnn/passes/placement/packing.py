"""Pack blocks with known live ranges into one arena: heuristics and search.

Finding the smallest arena is NP-hard. Its lower bound, the peak of live bytes, is
mostly reached by one of a few allocation heuristics, which differ in the order of
blocks and in the choice of gaps; the best result counts. If none reaches the bound,
blocks at the top of the arena are placed earlier and the rest again (`squeaky_wheel`),
within a limit of work.

Some blocks may have fixed offsets, such as those that two programs share. Then only
heuristics that work around fixed blocks are used.
"""

import bisect
import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mucudnn.passes.scheduling.intervals import in_period
from mucudnn.passes.scheduling.schedulers import Clock


@dataclass(frozen=True, slots=True)
class Block:
    """A number of bytes with an inclusive live range."""

    name: str
    nbytes: int
    first: int
    last: int


_WORK = 20_000_000

_ROUNDS = 5000


@dataclass(frozen=True, slots=True)
class Packing:
    """Offsets of blocks by name, and the size of the arena in bytes."""

    offsets: Mapping[str, int]
    nbytes: int


def pack(
    blocks: Sequence[Block],
    *,
    fixed: Mapping[str, int] | None = None,
    work: int = _WORK,
) -> Packing:
    """Assign offsets such that blocks alive at the same time do not overlap.

    Args:
        blocks: Blocks with distinct names; aligned sizes give aligned offsets.
        fixed: Offsets of fixed blocks, which do not overlap.
        work: Limit of compared pairs of blocks; beyond it only heuristics of
            near-linear time are tried.
    """
    pinned = fixed or {}
    solid = [block for block in blocks if block.nbytes]
    pinned_offsets = {
        i: pinned[b.name] for i, b in enumerate(solid) if b.name in pinned
    }
    tops = (offset + solid[i].nbytes for i, offset in pinned_offsets.items())
    # No packing is lower than this: the search ends there.
    bound = max(live_peak(solid), *tops, 0)
    best: Sequence[int] = ()
    height: float = math.inf
    for offsets in _attempts(solid, pinned_offsets, bound, work):
        top = _height(solid, offsets)
        if top < height:
            best, height = offsets, top
        if height <= bound:
            break
    found = {block.name: 0 for block in blocks} | dict(pinned)
    found |= {block.name: offset for block, offset in zip(solid, best, strict=True)}
    return Packing(MappingProxyType(found), _height(solid, best))


def live_peak(blocks: Sequence[Block]) -> int:
    """Return the peak of live bytes, a lower bound of the arena."""
    change: Counter[int] = Counter()
    for block in blocks:
        change[block.first] += block.nbytes
        change[block.last + 1] -= block.nbytes
    used = itertools.accumulate(change[moment] for moment in sorted(change))
    return max(used, default=0)


def _height(blocks: Sequence[Block], offsets: Sequence[int]) -> int:
    return max((o + b.nbytes for o, b in zip(offsets, blocks, strict=True)), default=0)


def _attempts(
    blocks: Sequence[Block], fixed: Mapping[int, int], bound: int, work: int
) -> Iterator[list[int]]:
    """Yield offsets by one heuristic after another, the fast ones first."""
    # 1. Like a runtime allocator, forwards and backwards in time.
    if not fixed:
        mirrored = [Block(b.name, b.nbytes, -b.last, -b.first) for b in blocks]
        for best_fit in (False, True):
            yield by_time(blocks, best_fit=best_fit)
            yield by_time(mirrored, best_fit=best_fit)
    # 2. On top of each other: near-linear time, whatever the number of blocks.
    orders = placing_orders(blocks, [i for i in range(len(blocks)) if i not in fixed])
    for order in orders[:2]:
        yield on_top(blocks, order, fixed)
    # 3. In the lowest gaps, by several orders, as far as the work allows.
    rounds = min(_ROUNDS, 2 * work // (len(blocks) ** 2 + 1))
    found = []
    for order in orders[:rounds]:
        offsets = in_gaps(blocks, order, fixed=fixed)
        found.append((_height(blocks, offsets), order, offsets))
        yield offsets
    if rounds <= len(orders):
        return
    # 4. Squeaky wheel: blocks above the bound are placed earlier in the next round.
    _, order, offsets = min(found)
    wheel = SqueakyWheel(order)
    for _ in range(rounds - len(orders)):
        wheel.judge(_height(blocks, offsets))
        ends = ((i, offsets[i] + blocks[i].nbytes) for i in wheel.order)
        wheel.reorder(i for i, end in ends if end > bound)
        offsets = in_gaps(blocks, wheel.order, fixed=fixed)
        yield offsets


def placing_orders(blocks: Sequence[Block], selected: Sequence[int]) -> list[list[int]]:
    """Return orders in which to place some of the blocks.

    The orders are by lifetime, by area, by size, by start and by end.
    """

    def life(i: int) -> int:
        return blocks[i].last - blocks[i].first + 1

    keys: tuple[Callable[[int], tuple[int, ...]], ...] = (
        lambda i: (-life(i), -blocks[i].nbytes, blocks[i].first),
        lambda i: (-life(i) * blocks[i].nbytes, blocks[i].first),
        lambda i: (-blocks[i].nbytes, -life(i), blocks[i].first),
        lambda i: (blocks[i].first, -blocks[i].last),
        lambda i: (-blocks[i].last, blocks[i].first),
    )
    return [sorted(selected, key=key) for key in keys]


# Allocation heuristics: greedy assignment of offsets to blocks, without backtracking.
#
# Each heuristic returns one offset per block, in the order of the given blocks.


_NOTHING: Mapping[int, int] = MappingProxyType({})


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
    blocks: Sequence[Block], order: Sequence[int], fixed: Mapping[int, int] = _NOTHING
) -> list[int]:
    """Place each block above all placed blocks that are alive at the same time.

    Gaps below are lost, but no blocks are compared with each other.
    """
    moments = sorted({b.first for b in blocks} | {b.last for b in blocks})
    index = {moment: i for i, moment in enumerate(moments)}
    heights = [0] * len(moments)
    offsets = [fixed.get(i, 0) for i in range(len(blocks))]
    for i in (*fixed, *order):
        life = slice(index[blocks[i].first], index[blocks[i].last] + 1)
        below, nbytes = heights[life], blocks[i].nbytes
        if i in fixed:
            heights[life] = [max(height, fixed[i] + nbytes) for height in below]
        else:
            offsets[i] = max(below)
            heights[life] = [offsets[i] + nbytes] * len(below)
    return offsets


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
    occupied = _Occupied(1 + max((b.last for b in blocks), default=0), len(blocks))
    for i in (*fixed, *order):
        block = blocks[i]
        life = ((block.first, block.last),)
        if i not in fixed:
            offset = occupied.lowest(life, block.nbytes)
            if offset + block.nbytes > limit:
                continue
            offsets[i] = offset
        occupied.take(offsets[i], block.nbytes, life)
    return offsets


# Squeaky wheel optimisation of the order of a greedy placement.
#
# A greedy placement is as good as its order. Items that fared badly in one order move
# by a random distance towards the front of the next (Joslin & Clements 1999). Now and
# then the search returns to the best order so far; without that it cycles.


_RETURN = 0.1
"""Probability of returning from a worse order to the best one."""


class SqueakyWheel:
    """Sequence of orders to try, starting from `order`.

    Attributes:
        order: The order to try next.
        least: Cost of the best order so far.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self.order = self._best = order
        self.least = math.inf
        self._chance = random.Random(0)

    def judge(self, cost: float) -> None:
        """Report the cost of the current order, and maybe return to the best order."""
        if cost <= self.least:
            self.least, self._best = cost, self.order
        elif self._chance.random() < _RETURN:
            self.order = self._best

    def reorder(self, squeaking: Iterable[int]) -> None:
        """Make the next order by moving badly placed items towards the front."""
        rank = {i: r + 1.0 for r, i in enumerate(self.order)}
        for i in squeaking:
            rank[i] *= self._chance.random()
        self.order = sorted(self.order, key=rank.__getitem__)


# Place intervals that may shrink in an arena of a given size.
#
# A prefetch may begin later and an offload may be awaited earlier than a schedule
# wants; only the time from the first use to the last is required. An interval for which
# there is no gap over its whole wanted time gets the gap that keeps the longest part of
# it. Intervals are placed one after another; those without any gap are placed earlier
# in the next round (`squeaky_wheel`).


_MOST_ROUNDS = 300

_SHRINK_WORK = 25_000
"""Limit of intervals placed in all rounds of one order."""

_BATCHES = 5
"""Number of turns in which the rounds of all orders are interleaved."""

_HOPELESS = 3.0
"""Factor on the fewest unplaced bytes so far at which a round is abandoned."""

_BUCKETS = 64

_IN_BUCKET = 48
"""Number of intervals for each of so many buckets."""

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
    rounds = min(_MOST_ROUNDS, 1 + _SHRINK_WORK // max(1, len(intervals)))
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
        # Orders take turns; the first turn with complete placements is the last.
        for wheel in wheels:
            places = _first_of(attempt, wheel, batch)
            if places is not None:
                found = True
                yield places
        if found:
            return


def improve_places(
    intervals: Sequence[Shrinkable],
    limit: int,
    clock: Clock,
    places: Sequence[Place],
    cost: Callable[[list[Place]], float],
) -> Iterator[list[Place]]:
    """Yield further complete placements, with shortened intervals placed earlier.

    Args:
        intervals: The intervals.
        limit: Size of the arena.
        clock: Times of positions.
        places: The best placement so far.
        cost: Returns what to lower, such as the time of the step.
    """
    attempt = _Attempt(intervals, limit, clock)
    first = sorted(range(len(intervals)), key=lambda i: _KEYS[0](intervals[i]))
    wheel = SqueakyWheel(first)
    wheel.least = least = cost(list(places))
    squeaking = _shortened_in(intervals, places)
    for _ in range(min(_MOST_ROUNDS, _SHRINK_WORK // max(1, len(intervals)))):
        # Intervals that found no place, or only a short one, move ahead in the order.
        wheel.reorder(squeaking)
        found, left = attempt(wheel.order, math.inf)
        complete = [place for place in found if place is not None]
        if left:
            squeaking = left
            wheel.judge(math.inf)
            continue
        squeaking = _shortened_in(intervals, complete)
        now = cost(complete)
        wheel.judge(now)
        if now < least:
            least = now
            yield complete
        if not squeaking:
            return


def _shortened_in(
    intervals: Sequence[Shrinkable], places: Sequence[Place]
) -> list[int]:
    """Return the intervals that a placement has shortened."""
    return [
        i
        for i, (interval, place) in enumerate(zip(intervals, places, strict=True))
        if (place.start, place.stop) != (interval.start, interval.stop)
    ]


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
        self._whole = [in_period(b.start, b.stop, period) for b in intervals]
        self._core = [in_period(b.needed, b.last, period) for b in intervals]

    def __call__(
        self, order: Sequence[int], hopeless: float
    ) -> tuple[list[Place | None], list[int]]:
        """Return the place of each interval, and the intervals without a gap."""
        left: list[int] = []
        missing = 0
        found: list[Place | None] = [None] * len(self.intervals)
        occupied = _Occupied(self._period, len(self.intervals))
        for i in order:
            interval, whole = self.intervals[i], self._whole[i]
            offset = occupied.lowest(whole, interval.nbytes)
            if offset + interval.nbytes <= self._limit:
                found[i] = Place(offset, interval.start, interval.stop)
                occupied.take(offset, interval.nbytes, whole)
                continue
            # Otherwise try a shorter interval, down to the core that must not be cut.
            if (core := self._core[i]) != whole:
                found[i] = self._shortened(interval, core, occupied.during(whole))
            place = found[i]
            if place is None:
                left.append(i)
                missing += interval.nbytes
                if missing > hopeless:
                    break
            else:
                ranges = in_period(place.start, place.stop, self._period)
                occupied.take(place.offset, interval.nbytes, ranges)
        return found, left

    def _shortened(
        self, interval: Shrinkable, core: Sequence[Positions], near: Sequence[Row]
    ) -> Place | None:
        """Return the place that keeps the most of an interval, the lowest of equals."""
        # `hard` rows are in the way of the core, `soft` ones of the rest only.
        hard: list[Row] = []
        soft: list[Row] = []
        # Twice the same range if the core is one range: faster than a loop over ranges.
        (first, last), (begin, end) = core[0], core[-1]
        for row in near:
            low, high, begins, ends = row
            if (begins <= last and first <= ends) or (begins <= end and begin <= ends):
                hard.append(row)
            else:
                soft.append((low, high, *self._remaining(interval, begins, ends)))
        most = self._worth(interval.start, interval.stop)
        best: Place | None = None
        best_worth = -1.0
        for low, high in _gaps(hard, interval.nbytes, self._limit):
            inside = [row for row in soft if row[0] < high and low < row[1]]
            # Any other place can be lowered to one of these without losing time.
            offsets = {low, high - interval.nbytes}
            offsets.update(
                end for _, end, _, _ in soft if low <= end <= high - interval.nbytes
            )
            for offset in sorted(offsets):
                start, stop = _extent(interval, offset, inside)
                worth = self._worth(start, stop)
                if worth > best_worth:
                    best, best_worth = Place(offset, start, stop), worth
                if worth >= most:
                    return best
        return best

    def _remaining(self, interval: Shrinkable, first: int, last: int) -> Positions:
        """Return what remains of an interval beside one that its core does not meet."""
        start, stop = interval.start, interval.stop
        inside = start >= 0 and stop < self._period
        for shift in (0,) if inside else (-self._period, 0, self._period):
            if start <= last + shift < interval.needed:
                start = last + shift + 1
            if interval.last < first + shift <= stop:
                stop = first + shift - 1
        return start, stop

    def _worth(self, start: int, stop: int) -> float:
        return self._clock.start(stop + 1) - self._clock.start(start)


def _extent(interval: Shrinkable, offset: int, soft: Sequence[Row]) -> Positions:
    """Return what remains of an interval at an offset.

    Args:
        interval: The interval to be shortened.
        offset: Its offset.
        soft: Offsets of others, ascending, and what each leaves of the interval.
    """
    start, stop, top = interval.start, interval.stop, offset + interval.nbytes
    for low, high, begin, end in soft:
        if low >= top:
            break
        if offset < high:
            if begin > start:
                start = begin
            if end < stop:
                stop = end
    return start, stop


class _Occupied:
    """Occupied bytes over time, sorted by offset, and bucketed by time for speed."""

    def __init__(self, period: int, count: int) -> None:
        buckets = min(_BUCKETS, 1 + count // _IN_BUCKET)
        self._rows: list[Row] = []
        self._width = 1 + period // buckets
        self._buckets: list[list[Row]] = [[] for _ in range(1 + period // self._width)]

    def take(self, offset: int, nbytes: int, ranges: Sequence[Positions]) -> None:
        """Occupy bytes at some positions."""
        for first, last in ranges:
            row = offset, offset + nbytes, first, last
            bisect.insort(self._rows, row)
            for bucket in range(first // self._width, last // self._width + 1):
                bisect.insort(self._buckets[bucket], row)

    def lowest(self, ranges: Sequence[Positions], nbytes: int) -> int:
        """Return the lowest offset with so many free bytes over one or two ranges."""
        end = 0
        if len(ranges) == 1:
            ((first, last),) = ranges
            for low, high, begins, ends in self._near(first, last):
                if begins <= last and first <= ends:
                    if low - end >= nbytes:
                        return end
                    if high > end:
                        end = high
            return end
        for low, high, _, _ in self.during(ranges):
            if low - end >= nbytes:
                break
            if high > end:
                end = high
        return end

    def during(self, ranges: Sequence[Positions]) -> list[Row]:
        """Return the rows that overlap one or two ranges, by ascending offset."""
        if len(ranges) == 1:
            ((first, last),) = ranges
            rows = self._near(first, last)
            return [row for row in rows if row[2] <= last and first <= row[3]]
        (first, last), (begin, end) = ranges
        return [
            row
            for row in self._rows
            if (row[2] <= last and first <= row[3])
            or (row[2] <= end and begin <= row[3])
        ]

    def _near(self, first: int, last: int) -> list[Row]:
        """Return a bucket with all rows that overlap a range, or all rows."""
        bucket = first // self._width
        return self._buckets[bucket] if last // self._width == bucket else self._rows


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
