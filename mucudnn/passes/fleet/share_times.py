"""Time of a share of the mini-batch on one rank, as a function of its size.

A step table is piecewise linear. A share that runs as p equal steps takes p times as
long as a p-th of it, so it lies on the same segments, scaled by p. The times of all
shares are a few segments per number of steps; no share is computed by itself.
"""

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mucudnn.ir.fleet import Rank, StepTable

__all__ = ["ShareTimes", "share_times"]


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
            yield line.start
            yield self.most_by(line.at(line.start))
            yield line.stop


def share_times(rank: Rank, most: int) -> ShareTimes:
    """Return the times of a rank's shares of up to `most` samples.

    A share that does not fit runs as the fewest steps that do, as equal as possible.
    """
    at_once = min(rank.most_at_once, most)
    lines = [_Line(0, 0, 0, 0.0, 0.0, 0.0)]
    largest = (most if rank.accumulates else at_once) if at_once else 0
    sides = _segments(rank.table)
    longest = 0.0
    for first in range(1, largest + 1, max(1, at_once)):
        last, passes = min(first + at_once - 1, largest), -(-first // at_once)
        for base, stop, ms, slope in sides:
            start, end = max(first, passes * base + (base > 0)), passes * stop
            if start > last or end < start:
                continue
            end = min(end, last)
            begin = passes * ms + slope * (start - passes * base)
            longest = max(longest, begin)
            line = _Line(start, end, passes * base, passes * ms, slope, longest)
            longest = max(longest, line.at(end))
            lines.append(line)
    return ShareTimes(
        tuple(lines), tuple(line.at(line.start) for line in lines), at_once
    )


def _segments(table: StepTable) -> Sequence[tuple[int, int, float, float]]:
    """Return a table's segments: first and last size, time at the first, slope."""
    found = [(0, table.points[0].samples, table.points[0].time_ms, 0.0)]
    for before, after in pairwise(table.points):
        slope = (after.time_ms - before.time_ms) / (after.samples - before.samples)
        found.append((before.samples, after.samples, before.time_ms, slope))
    return found


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
