"""Which algorithms are still in the race at which sizes, by what smaller sizes took.

An algorithm is hopeless at a size where another one takes a small part of its time and
fits wherever it would be asked for: then no plan, divided or not, needs it. Its own
time is taken to be the least that other sizes allow (beyond the largest, each sample
takes what it took between the last two: a start-up that many samples share, such as a
transform of the filter, is forgiven), the other's the most. So what is worth timing is
known before it starts. What turns out to fail is ahead of nobody. What needs more than
any limit is worth timing only if it may be faster than what needs no more.

Sizes are raced in stages: the smallest, which tells cheaply what all will take; those
up to an eighth of the mini-batch, of which nobody misses the second smallest, as it
takes two times to tell a start-up; the mini-batch itself, whose times all plans are
compared with, but after an eighth of it, which tells more of the start-up than the
smallest sizes do; and what lies between, where both neighbours are known.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from mucudnn.ir.conv import AlgoPerf
from mucudnn.ir.limits import ANY_LIMIT, LimitRange

__all__ = ["Point", "Race", "race"]

Point = tuple[str, int]
"""(algorithm, micro-batch size)."""

_HOPELESS = 2.0
"""How many times the other's time is too much."""

_FIRST_SHARE = 8
"""Sizes up to this part of the mini-batch come before it."""


@dataclass(frozen=True, slots=True)
class Race:
    """What is to be timed yet.

    Attributes:
        points: In the race, by stage; those of the first stage are to be timed next.
        hopeless: Out of it, each with the algorithm that is ahead.
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
    """Ask again with the results, until no points are left.

    Args:
        sizes: To be timed at; the largest is the mini-batch.
        workspaces: Bytes of every algorithm at every size that may be timed.
        measured: Results so far, at these or other sizes; a failure counts as one.
        limits: Of workspace, that plans will be asked for under. An algorithm matters
            where it fits, so of limits below its own workspace is the least.
    """
    rows = list(measured)
    known = {(row.algo, row.batch) for row in rows}
    times = _Times.of(row for row in rows if row.error is None)
    first = sorted(sizes)[:2]
    largest = max(sizes, default=1)
    wanted: list[Point] = []
    vague: list[str] = []
    hopeless: dict[Point, str] = {}
    for batch in sorted(sizes, reverse=True):
        here = {algo: n for (algo, size), n in workspaces.items() if size == batch}
        able = [a for a in here if (a, batch) not in known or batch in times.known(a)]
        for algo, nbytes in here.items():
            if (algo, batch) in known:
                continue
            fits = [b for b in able if here[b] <= max(nbytes, limits.least)]
            ahead = min(fits, key=lambda b: times.most(b, batch), default=algo)
            least = times.least(algo, batch) if ahead != algo else 0.0
            enough = _HOPELESS if nbytes <= limits.most else 1.0
            enough *= times.most(ahead, batch)
            if least > enough and not (batch in first and batch < largest):
                hopeless[algo, batch] = ahead
                continue
            wanted.append((algo, batch))
            if ahead != algo and batch == largest and times.most(algo, batch) > enough:
                vague.append(algo)
    for point in _probes(vague, times, sizes):
        if hopeless.pop(point, None) is not None:
            wanted.append(point)
    stages: dict[int, list[Point]] = {}
    for algo, batch in sorted(wanted, key=lambda point: -point[1]):
        stages.setdefault(_stage(batch, first, largest), []).append((algo, batch))
    ordered = tuple(tuple(stages[stage]) for stage in sorted(stages))
    return Race(ordered, hopeless)


def _probes(
    vague: Iterable[str], times: "_Times", sizes: Sequence[int]
) -> Iterator[Point]:
    """What to time of algorithms whose start-up the smallest sizes do not tell."""
    probe = max((n for n in sizes if n * _FIRST_SHARE <= max(sizes)), default=0)
    for algo in vague:
        if len(times.known(algo)) > 1 and max(times.known(algo)) < probe:
            yield algo, probe


def _stage(batch: int, first: Sequence[int], largest: int) -> int:
    if batch == first[0]:
        return 0
    if batch == largest:
        return 2
    return 1 if batch in first or batch * _FIRST_SHARE <= largest else 3


@dataclass(frozen=True, slots=True)
class _Times:
    """Size -> time, ascending, of each algorithm."""

    by_algo: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[AlgoPerf]) -> "_Times":
        by_algo: dict[str, dict[int, float]] = {}
        for row in sorted(rows, key=lambda row: row.batch):
            by_algo.setdefault(row.algo, {})[row.batch] = row.time_ms
        return cls(by_algo)

    def known(self, algo: str) -> Mapping[int, float]:
        """What is known of one algorithm."""
        return self.by_algo.get(algo, {})

    def most(self, algo: str, batch: int) -> float:
        """What it takes at the most: no more than a larger size, or smaller ones."""
        own = self.known(algo)
        if batch in own:
            return own[batch]
        above = [time for size, time in own.items() if size > batch]
        below = [time * -(-batch // size) for size, time in own.items() if size < batch]
        return min((*above, *below[-1:]), default=inf)

    def least(self, algo: str, batch: int) -> float:
        """What it takes at the least; 0 where nothing is known."""
        own = self.known(algo)
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
