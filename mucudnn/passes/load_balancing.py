"""Share a mini-batch among unequal devices that wait for each other."""

import math
import operator
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from mucudnn.arguments import check_integer
from mucudnn.errors import PlanningError
from mucudnn.ir.fleet import Fleet, Rank, StepPoint, StepTable

_FINE = 16
"""Sizes within 1 / _FINE of each other count as equal."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """The step table a rank reports to the others.

    Attributes:
        table: Times by size; the last may be extrapolated.
        measured: Sizes that were measured.
    """

    table: StepTable
    measured: frozenset[int]

    def knows(self, samples: int) -> bool:
        """Return whether a share fits and was measured, up to 1 / _FINE of its size."""
        near = any(abs(n - samples) <= samples // _FINE for n in self.measured)
        return near and samples <= max(self.measured)


class AskedTable:
    """The step table of one rank, measured on demand.

    Args:
        device: Name of the device.
        least: Smallest size, which has to fit.
        most: Largest size.
        measure: Function that measures a size.
        unfitting: Exceptions `measure` raises for sizes that do not fit; for the
            smallest size they are propagated.
    """

    def __init__(
        self,
        device: str,
        least: int,
        most: int,
        measure: Callable[[int], StepPoint],
        *,
        unfitting: tuple[type[Exception], ...] = (),
    ) -> None:
        self._device = device
        self._measure = measure
        self._unfitting = unfitting
        self._most = most
        self._known = {least: measure(least)}

    def report(self) -> RankReport:
        """Return the table, extrapolated to the largest size that may fit."""
        points = [self._known[samples] for samples in sorted(self._known)]
        if points[-1].samples < self._most:
            points.append(_extrapolate(points, self._most))
        return RankReport(
            StepTable(self._device, tuple(points)), frozenset(self._known)
        )

    def ask(self, samples: int) -> None:
        """Measure a size; if it does not fit, search for the largest that does."""
        if samples in self._known or self._fits(samples):
            return
        fitting = max(n for n in self._known if n < samples)
        self._most = _largest_fitting(fitting, samples, self._fits)

    def _fits(self, samples: int) -> bool:
        try:
            self._known[samples] = self._measure(samples)
        except self._unfitting:
            return False
        return True


def _largest_fitting(most: int, beyond: int, fits: Callable[[int], bool]) -> int:
    """Return the largest size that fits, up to a sixteenth; `beyond` does not fit."""
    while beyond - most > max(1, most // _FINE):
        middle = (most + beyond) // 2
        if fits(middle):
            most = middle
        else:
            beyond = middle
    return most


def _extrapolate(points: list[StepPoint], samples: int) -> StepPoint:
    """Extrapolate from the last two points, or in proportion from a single one."""
    last = points[-1]
    slope = last.time_ms / last.samples
    if len(points) > 1:
        before = points[-2]
        slope = (last.time_ms - before.time_ms) / (last.samples - before.samples)
    return StepPoint(samples, last.time_ms + max(0.0, slope) * (samples - last.samples))


# Time of a share of the mini-batch on one rank, as a function of its size.
#
# A step table is piecewise linear. A share that runs as p equal steps takes p times as
# long as a p-th of it, so it lies on the same segments, scaled by p. The times of all
# shares are a few segments per number of steps; no share is computed by itself.


@dataclass(frozen=True, slots=True)
class _Line:
    """Times of shares of `start` to `stop` samples: `ms` at `base`, then by `slope`.

    Attributes:
        floor: Lower limit: the longest time of any smaller share.
    """

    start: int
    stop: int
    base: int
    ms: float
    slope: float
    floor: float

    def at(self, samples: int) -> float:
        return max(self.floor, self.ms + self.slope * (samples - self.base))


@dataclass(frozen=True, slots=True, eq=False)
class ShareTimes:
    """Non-decreasing times of shares of 0, 1, … samples; compared by identity.

    Where a table's times fall (noise, or a size that the device handles badly), a share
    counts as long as the longest smaller one. The shares that fit into a time are
    therefore a contiguous range.

    Attributes:
        lines: Segments in order, from 0 samples on.
        firsts: Time of the first share of each segment.
        at_once: Samples of the largest step that fits; larger shares run as several.
    """

    lines: tuple[_Line, ...]
    firsts: tuple[float, ...]
    at_once: int

    @property
    def most(self) -> int:
        """Largest feasible share."""
        return self.lines[-1].stop

    @property
    def times_ms(self) -> tuple[float, ...]:
        """Time of each size, from 0 samples on."""
        return tuple(
            line.at(n) for line in self.lines for n in range(line.start, line.stop + 1)
        )

    def time_ms(self, samples: int) -> float:
        """Return the time of a feasible share."""
        place = bisect_right(self.lines, samples, key=lambda line: line.start) - 1
        return self.lines[place].at(samples)

    def most_by(self, time_ms: float) -> int:
        """Return the largest share that takes at most this time."""
        place = bisect_right(self.firsts, time_ms) - 1
        return _last(self.lines[place], time_ms, operator.le) if place >= 0 else -1

    def most_before(self, time_ms: float) -> int:
        """Return the largest share that takes less than this time; -1 if none does."""
        place = bisect_left(self.firsts, time_ms) - 1
        return _last(self.lines[place], time_ms, operator.lt) if place >= 0 else -1

    def passes(self, samples: int) -> int:
        """Return the number of steps a share runs as."""
        return -(-samples // self.at_once) if samples else 0

    def corners(self) -> Iterator[int]:
        """Yield shares among which is the one with the highest throughput."""
        for line in self.lines[1:]:
            # A share takes at least as long as smaller ones: a line may begin flat.
            flat = self.most_by(line.at(line.start))
            yield from (line.start, flat, min(flat + 1, line.stop), line.stop)


def share_times(rank: Rank, most: int) -> ShareTimes:
    """Return the times of a rank's shares of up to `most` samples.

    A share that does not fit runs as the fewest steps that do, as equal as possible.
    """
    at_once = min(rank.most_at_once, most)
    lines = [_Line(0, 0, 0, 0.0, 0.0, 0.0)]
    # Shares beyond what fits at once run as several passes, where these may be summed.
    largest = (most if rank.accumulates else at_once) if at_once else 0
    # A table's segments: first and last size, time at the first, slope.
    points = rank.table.points
    sides = [(0, points[0].samples, points[0].time_ms, 0.0)]
    for before, after in pairwise(points):
        slope = (after.time_ms - before.time_ms) / (after.samples - before.samples)
        sides.append((before.samples, after.samples, before.time_ms, slope))
    longest = 0.0
    for first in range(1, largest + 1, max(1, at_once)):
        last, passes = min(first + at_once - 1, largest), -(-first // at_once)
        # With p passes, a segment of the table covers p times as many samples.
        for base, stop, ms, slope in sides:
            start, end = max(first, passes * base + (base > 0)), passes * stop
            if start > last or end < start:
                continue
            end = min(end, last)
            longest = max(longest, passes * ms + slope * (start - passes * base))
            line = _Line(start, end, passes * base, passes * ms, slope, longest)
            longest = max(longest, line.at(end))
            lines.append(line)
    return ShareTimes(
        tuple(lines), tuple(line.at(line.start) for line in lines), at_once
    )


def _last(line: _Line, time_ms: float, fits: Callable[[float, float], bool]) -> int:
    """Return the largest share of a segment that fits into a time."""
    if fits(line.at(line.stop), time_ms) or line.slope <= 0:
        return line.stop
    found = line.base + int((time_ms - line.ms) / line.slope)
    found = min(max(found, line.start), line.stop)
    while found > line.start and not fits(line.at(found), time_ms):
        found -= 1
    while found < line.stop and fits(line.at(found + 1), time_ms):
        found += 1
    return found


# Split of a mini-batch among ranks, and its cost.


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a mini-batch.

    Attributes:
        samples: Number of samples; 0 if the others are faster without this rank.
        passes: Number of steps the share runs as, with accumulated gradients.
        time_ms: Time of all these steps.
    """

    samples: int
    passes: int
    time_ms: float


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A mini-batch shared among ranks.

    Attributes:
        shares: One share per rank.
        all_reduce_ms: Time of the gradients' all-reduce.
    """

    shares: tuple[Share, ...]
    all_reduce_ms: float

    @property
    def samples(self) -> tuple[int, ...]:
        """Samples of each rank."""
        return tuple(share.samples for share in self.shares)

    @property
    def batch(self) -> int:
        """Total number of samples."""
        return sum(self.samples)

    @property
    def compute_ms(self) -> float:
        """Time until the slowest rank has its gradients."""
        return max(share.time_ms for share in self.shares)

    @property
    def step_ms(self) -> float:
        """Time of the step, all-reduce included."""
        return self.compute_ms + self.all_reduce_ms

    @property
    def idle_ms(self) -> tuple[float, ...]:
        """Time each rank waits for the slowest."""
        return tuple(self.compute_ms - share.time_ms for share in self.shares)

    @property
    def samples_per_s(self) -> float:
        """Throughput of the fleet in samples per second."""
        return 1e3 * self.batch / self.step_ms


def times_of(fleet: Fleet, most: int) -> tuple[ShareTimes, ...]:
    """Return the share times of each rank; equal ranks share one object."""
    known: dict[Any, ShareTimes] = {}
    found = []
    for rank in fleet.ranks:
        kind = rank.table.points, rank.memory, rank.accumulates
        if kind not in known:
            known[kind] = share_times(rank, most)
        found.append(known[kind])
    return tuple(found)


def plan_of(
    fleet: Fleet, samples: Sequence[int], times: Sequence[ShareTimes] | None = None
) -> FleetPlan:
    """Return the plan of given shares; `times` are those of the ranks, if known."""
    if len(samples) != len(fleet.ranks):
        raise ValueError(
            f"there are {len(samples)} shares for {len(fleet.ranks)} ranks"
        )
    known = times_of(fleet, max(samples)) if times is None else times
    shares = []
    for rank, share, of in zip(fleet.ranks, samples, known, strict=True):
        if share > of.most:
            raise PlanningError(
                f"{rank.name} takes at most {of.most} samples a step, not {share}"
            )
        shares.append(Share(share, of.passes(share), of.time_ms(share)))
    return FleetPlan(tuple(shares), fleet.all_reduce_ms)


def equal_shares(fleet: Fleet, batch: int) -> FleetPlan:
    """Give every rank the same share, as data-parallel training usually does."""
    each, more = divmod(batch, len(fleet.ranks))
    return plan_of(fleet, [each + (i < more) for i in range(len(fleet.ranks))])


def proportional_shares(fleet: Fleet, batch: int) -> FleetPlan:
    """Share in proportion to each rank's speed at an equal share.

    Samples left by rounding go to the ranks that lost the most.
    """
    times = times_of(fleet, batch)
    equal = -(-batch // len(times))
    speeds = [_speed(of, min(equal, of.most)) for of in times]
    exact = [batch * speed / sum(speeds) for speed in speeds]
    samples = [int(share) for share in exact]
    lost = sorted(range(len(exact)), key=lambda i: samples[i] - exact[i])
    for i in lost[: batch - sum(samples)]:
        samples[i] += 1
    return plan_of(fleet, samples, times)


def step_bound_ms(fleet: Fleet, batch: int) -> float:
    """Return a lower bound of the step: every rank at its best throughput."""
    rates = (
        max((_speed(of, n) for n in of.corners()), default=0.0)
        for of in times_of(fleet, batch)
    )
    return batch / sum(rates) + fleet.all_reduce_ms


def _speed(times: ShareTimes, samples: int) -> float:
    return samples / times.time_ms(samples) if samples else 0.0


DRIFT_TOLERANCE = 0.15
"""Relative drift of a rank's time that is ignored."""

GAIN = 0.05
"""Fraction of the step that another split must save to be worth the change."""


def drifted(fleet: Fleet, factors: Sequence[float]) -> Fleet:
    """Return the fleet with each rank's times scaled by its factor."""
    ranks = (
        replace(rank, table=rank.table.scaled(factor))
        for rank, factor in zip(fleet.ranks, factors, strict=True)
    )
    return replace(fleet, ranks=tuple(ranks))


def replanned(
    fleet: Fleet, samples: Sequence[int], factors: Sequence[float], *, at_least: int = 0
) -> FleetPlan | None:
    """Return a better split if ranks drifted and the change pays; else None.

    Two thresholds keep the split from oscillating: drift within the tolerance is
    ignored, and a change that saves less than `GAIN` is not made.

    Args:
        fleet: The fleet as it was measured.
        samples: The current split.
        factors: Current time of each rank over the time in its table.
        at_least: Minimum samples of every rank.
    """
    low, high = 1 / (1 + DRIFT_TOLERANCE), 1 + DRIFT_TOLERANCE
    seen = [1.0 if low <= factor <= high else factor for factor in factors]
    now = drifted(fleet, seen)
    found = split_batch(now, sum(samples), at_least=at_least)
    kept = plan_of(now, samples)
    return found if found.step_ms <= (1 - GAIN) * kept.step_ms else None


SIZE_TOLERANCE = 0.03
"""Relative error allowed for interpolated times."""


def measured_table(
    device: str,
    least: int,
    most: int,
    measure: Callable[[int], StepPoint],
    *,
    tolerance: float = SIZE_TOLERANCE,
    unfitting: type[Exception] | tuple[type[Exception], ...] = (),
) -> StepTable:
    """Measure a table with as few sizes as its shape requires.

    The two ends are measured first. A range is bisected (geometrically) until the time
    of its middle is on the line between its ends. Fixed costs make a step's time
    concave in its size, and a concave curve that meets its chord in the middle is the
    chord. If the largest size does not fit, the table ends with the largest one that
    does, up to a sixteenth. `unfitting` are the exceptions `measure` raises for sizes
    that do not fit; for the smallest size they are propagated.
    """
    known: dict[int, StepPoint] = {}

    def fits(size: int) -> bool:
        try:
            known[size] = measure(size)
        except unfitting:
            return False
        return True

    # If the largest size does not fit, bisect for one that does.
    if not fits(most):
        known[least] = measure(least)
        most = _largest_fitting(least, most, fits)
    elif least not in known:
        known[least] = measure(least)

    def refine(low: StepPoint, high: StepPoint) -> None:
        size = round(math.sqrt(low.samples * high.samples))
        if not low.samples < size < high.samples:
            return
        found = known.get(size) or measure(size)
        known[size] = found
        share = (size - low.samples) / (high.samples - low.samples)
        line = low.time_ms + share * (high.time_ms - low.time_ms)
        if abs(line - found.time_ms) > tolerance * found.time_ms:
            refine(low, found)
            refine(found, high)

    refine(known[least], known[most])
    return StepTable(device, tuple(known.values()))


# Split a mini-batch among ranks such that the slowest rank ends as early as possible.
#
#     minimize    max of t_i(n_i) + all-reduce
#     subject to  sum of n_i = N,  at_least <= n_i <= what rank i can take
#
# Oyama et al., "Accelerating Deep Learning Frameworks with Micro-batches", CLUSTER
# 2018, train on unequal devices this way, but do not publish how they divide. Times
# never fall with the share, so within a time T rank i takes at most c_i(T) samples, and
# T is enough if and only if these add up to N. The least such T is one of the times of
# the tables; it is bisected down to the last bit, so the result is exact.


_MOST = 1 << 20


def split_batch(fleet: Fleet, batch: int, *, at_least: int = 0) -> FleetPlan:
    """Split a mini-batch so that a step takes the least time.

    Args:
        fleet: The ranks.
        batch: Samples of all ranks together.
        at_least: Minimum samples of every rank; with 0 a slow rank may have none.

    Raises:
        ValueError: The batch has fewer samples than the ranks require.
        PlanningError: The batch does not fit on the fleet.
    """
    check_integer("batch", batch, 1, _MOST)
    times = times_of(fleet, batch)
    _check(fleet, times, batch, at_least)
    level = _least_time(Counter(times), batch, at_least)
    base = [max(at_least, of.most_before(level)) for of in times]
    room = [of.most_by(level) - n for of, n in zip(times, base, strict=True)]
    # Distribute the remaining samples evenly among ranks that have room.
    left = batch - sum(base)
    samples = list(base)
    open_ranks = sorted((i for i, n in enumerate(room) if n > 0), key=room.__getitem__)
    for place, i in enumerate(open_ranks):
        given = min(room[i], -(-left // (len(open_ranks) - place)))
        samples[i] += given
        left -= given
    return plan_of(fleet, samples, times)


def best_batch(fleet: Fleet, least: int, most: int, *, at_least: int = 0) -> FleetPlan:
    """Choose and split the mini-batch with the highest throughput in a range.

    Errors are those of `split_batch`.
    """
    check_integer("least", least, 1, _MOST)
    check_integer("most", most, least, _MOST)
    times = times_of(fleet, most)
    _check(fleet, times, least, at_least)
    kinds = Counter(times)
    floor = max(of.time_ms(at_least) for of in kinds)
    best, chosen = -1.0, least
    # Only at these times does a rank take more: try each as the step's time.
    for level in sorted({ms for of in kinds for ms in of.times_ms}):
        taken = min(most, _samples_within(kinds, level, at_least))
        if taken < least:
            continue
        rate = taken / (max(level, floor) + fleet.all_reduce_ms)
        if rate > best:
            best, chosen = rate, taken
        if taken == most:
            break
    return split_batch(fleet, chosen, at_least=at_least)


def _check(
    fleet: Fleet, times: Sequence[ShareTimes], batch: int, at_least: int
) -> None:
    check_integer("at_least", at_least, 0)
    if batch < at_least * len(times):
        raise ValueError(
            f"a batch of {batch} has fewer than {at_least} samples for each of "
            f"{len(times)} ranks"
        )
    for rank, of in zip(fleet.ranks, times, strict=True):
        if of.most < at_least:
            raise PlanningError(
                f"{rank.name} cannot take {at_least} samples a step: at most {of.most}"
            )
    together = sum(of.most for of in times)
    if together < batch:
        raise PlanningError(
            f"the fleet takes at most {together} samples a step, not {batch}; use a "
            "smaller batch, more memory or gradient accumulation"
        )


def _samples_within(kinds: Counter[ShareTimes], level: float, at_least: int) -> int:
    """Return the samples a fleet takes within a time, at least `at_least` per rank."""
    return sum(n * max(at_least, of.most_by(level)) for of, n in kinds.items())


def _least_time(kinds: Counter[ShareTimes], batch: int, at_least: int) -> float:
    """Return the least of the tables' times in which the fleet takes a batch."""
    low = 0.0
    if _samples_within(kinds, low, at_least) >= batch:
        return low
    high = max(of.time_ms(of.most) for of in kinds)
    while low < (middle := low + (high - low) / 2) < high:
        if _samples_within(kinds, middle, at_least) >= batch:
            # Only the times of the tables matter: step down to the next one.
            high = max(of.time_ms(of.most_by(middle)) for of in kinds)
        else:
            low = middle
    return high
