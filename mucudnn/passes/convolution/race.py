"""Exclude algorithms from timing at sizes where smaller sizes show them to be slow.

An algorithm is hopeless at a size if another algorithm takes a small part of its time
and fits within every limit at which the first would be considered: no plan needs it.
Its own time is bounded from below (beyond the largest measured size each sample takes
the time per sample between the last two, so that a shared start-up such as a filter
transform is not held against it), the other's from above. Failing algorithms exclude
nobody. An algorithm that needs more than the largest limit is timed only if it may be
faster than those that need no more.

Sizes are raced in stages, so that cheap timings decide about expensive ones:

1. the smallest size;
2. sizes up to an eighth of the mini-batch. The second smallest is timed for every
   algorithm, as a start-up shows only in two times;
3. the mini-batch itself, the reference of all plans;
4. the sizes in between, where both neighbours are known.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from mucudnn.ir.conv import AlgoPerf
from mucudnn.ir.limits import ANY_LIMIT, LimitRange

__all__ = ["Point", "Race", "race"]

Point = tuple[str, int]
"""(algorithm, micro-batch size)."""

_HOPELESS = 2.0
"""Factor on another algorithm's time from which an algorithm is hopeless."""

_FIRST_SHARE = 8
"""Sizes up to this fraction of the mini-batch are timed before it."""


@dataclass(frozen=True, slots=True)
class Race:
    """Points to time, and points that need not be timed.

    Attributes:
        points: Points to time, by stage; the first stage is next.
        hopeless: Excluded points, with the algorithm that is ahead.
    """

    points: tuple[tuple[Point, ...], ...]
    hopeless: Mapping[Point, str]


def race(
    sizes: Sequence[int],
    workspaces: Mapping[Point, int],
    measured: Iterable[AlgoPerf],
    *,
    limits: LimitRange = ANY_LIMIT,
) -> Race:
    """Return the points to time next; call again with results until none are left.

    Args:
        sizes: Sizes to time; the largest is the mini-batch.
        workspaces: Workspace in bytes of every point that may be timed.
        measured: Results so far, failures included, at these or other sizes.
        limits: Workspace limits that plans will be requested for.
    """
    rows = list(measured)
    known = {(row.algo, row.batch) for row in rows}
    times = _Times(row for row in rows if row.error is None)
    first = sorted(sizes)[:2]
    largest = max(sizes, default=1)
    wanted: list[Point] = []
    uncertain: list[str] = []
    hopeless: dict[Point, str] = {}
    for batch in sorted(sizes, reverse=True):
        here = {algo: n for (algo, size), n in workspaces.items() if size == batch}
        running = [
            a for a in here if (a, batch) not in known or batch in times.rows_of(a)
        ]
        for algo, nbytes in here.items():
            if (algo, batch) in known:
                continue
            fits = [b for b in running if here[b] <= max(nbytes, limits.least)]
            ahead = min(fits, key=lambda b: times.most_ms(b, batch), default=algo)
            least = times.least_ms(algo, batch) if ahead != algo else 0.0
            enough = _HOPELESS if nbytes <= limits.most else 1.0
            enough *= times.most_ms(ahead, batch)
            if least > enough and not (batch in first and batch < largest):
                hopeless[algo, batch] = ahead
                continue
            wanted.append((algo, batch))
            if (
                ahead != algo
                and batch == largest
                and times.most_ms(algo, batch) > enough
            ):
                uncertain.append(algo)
    for point in _probes(uncertain, times, sizes):
        if hopeless.pop(point, None) is not None:
            wanted.append(point)
    stages: dict[int, list[Point]] = {}
    for algo, batch in sorted(wanted, key=lambda point: -point[1]):
        stages.setdefault(_stage(batch, first, largest), []).append((algo, batch))
    ordered = tuple(tuple(stages[stage]) for stage in sorted(stages))
    return Race(ordered, hopeless)


def _probes(
    uncertain: Iterable[str], times: "_Times", sizes: Sequence[int]
) -> Iterator[Point]:
    """Yield a mid-size point of algorithms whose start-up is still unclear."""
    probe = max((n for n in sizes if n * _FIRST_SHARE <= max(sizes)), default=0)
    for algo in uncertain:
        if len(times.rows_of(algo)) > 1 and max(times.rows_of(algo)) < probe:
            yield algo, probe


def _stage(batch: int, first: Sequence[int], largest: int) -> int:
    if batch == first[0]:
        return 0
    if batch == largest:
        return 2
    return 1 if batch in first or batch * _FIRST_SHARE <= largest else 3


class _Times:
    """Measured times of each algorithm, by ascending size."""

    def __init__(self, rows: Iterable[AlgoPerf]) -> None:
        self._by_algo: dict[str, dict[int, float]] = {}
        for row in sorted(rows, key=lambda row: row.batch):
            self._by_algo.setdefault(row.algo, {})[row.batch] = row.time_ms

    def rows_of(self, algo: str) -> Mapping[int, float]:
        """Return the measured times of one algorithm, by size."""
        return self._by_algo.get(algo, {})

    def most_ms(self, algo: str, batch: int) -> float:
        """Return an upper bound: the time of a larger size, or of repeated smaller."""
        own = self.rows_of(algo)
        if batch in own:
            return own[batch]
        above = [time for size, time in own.items() if size > batch]
        below = [time * -(-batch // size) for size, time in own.items() if size < batch]
        return min((*above, *below[-1:]), default=inf)

    def least_ms(self, algo: str, batch: int) -> float:
        """Return a lower bound by extrapolation; 0 if no smaller size is measured."""
        own = self.rows_of(algo)
        below = [(size, time) for size, time in own.items() if size < batch]
        above = [(size, time) for size, time in own.items() if size > batch]
        if not below:
            return 0.0
        size, time = below[-1]
        if above:
            others = above[0]
        elif len(below) > 1:
            others = below[-2]
        else:
            return time
        slope = max(0.0, (others[1] - time) / (others[0] - size))
        return time + slope * (batch - size)
