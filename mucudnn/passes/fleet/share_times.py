"""What a share of the mini-batch takes on one rank, whatever its size.

A table is a few lines. A share that runs as p equal steps takes p times what a p-th of
it takes, so it is on the same lines, p times as long and high: times of all shares are
a few lines for each number of steps. Nothing is computed share by share.
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
        floor: The longest time of any share up to the first.
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
    """Times of shares of 0, 1, … samples; an object is equal to itself alone.

    They never fall: where a table's do, which is noise or a size that its device is
    bad at, a share counts as long as the longest of the smaller ones. So no share
    takes longer than is said here, and what fits into a time is an interval.

    Attributes:
        lines: Behind each other, from no samples on.
        firsts: The time of the first share of each.
        at_once: Samples of the largest step that fits; larger shares run as several.
    """

    lines: tuple[_Line, ...]
    firsts: tuple[float, ...]
    at_once: int

    @property
    def most(self) -> int:
        """The largest share that can be taken."""
        return self.lines[-1].stop

    @property
    def times_ms(self) -> tuple[float, ...]:
        """Of each size; of 0 it is 0."""
        return tuple(
            line.at(n) for line in self.lines for n in range(line.start, line.stop + 1)
        )

    def time_ms(self, samples: int) -> float:
        """Of a share, no larger than can be taken."""
        place = bisect_right(self.lines, samples, key=_start) - 1
        return self.lines[place].at(samples)

    def most_by(self, time_ms: float) -> int:
        """The largest share that takes no longer."""
        place = bisect_right(self.firsts, time_ms) - 1
        return _last(self.lines[place], time_ms, operator.le) if place >= 0 else -1

    def most_before(self, time_ms: float) -> int:
        """The largest share that takes less; -1 if none does."""
        place = bisect_left(self.firsts, time_ms) - 1
        return _last(self.lines[place], time_ms, operator.lt) if place >= 0 else -1

    def passes(self, samples: int) -> int:
        """How many steps a share runs as."""
        return -(-samples // self.at_once) if samples else 0

    def corners(self) -> Iterator[int]:
        """Shares among which is the one with the most samples a millisecond."""
        for line in self.lines[1:]:
            yield line.start
            yield self.most_by(line.at(line.start))
            yield line.stop


def share_times(rank: Rank, most: int) -> ShareTimes:
    """The times of a rank's shares of up to `most` samples.

    A share that does not fit runs as the fewest steps that do, as equal as can be.
    """
    at_once = min(rank.most_at_once, most)
    lines = [_Line(0, 0, 0, 0.0, 0.0, 0.0)]
    largest = (most if rank.accumulates else at_once) if at_once else 0
    sides = _sides(rank.table)
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


def _sides(table: StepTable) -> Sequence[tuple[int, int, float, float]]:
    """The lines of a table: first and last size, time at the first, slope."""
    found = [(0, table.points[0].samples, table.points[0].time_ms, 0.0)]
    for before, after in pairwise(table.points):
        slope = (after.time_ms - before.time_ms) / (after.samples - before.samples)
        found.append((before.samples, after.samples, before.time_ms, slope))
    return found


def _start(line: _Line) -> int:
    return line.start


def _last(line: _Line, time_ms: float, fits: Callable[[float, float], bool]) -> int:
    """The largest share of a line, whose first one fits, that fits into a time."""
    if fits(line.at(line.stop), time_ms) or line.slope <= 0:
        return line.stop
    found = line.base + int((time_ms - line.ms) / line.slope)
    found = min(max(found, line.start), line.stop)
    while found > line.start and not fits(line.at(found), time_ms):
        found -= 1
    while found < line.stop and fits(line.at(found + 1), time_ms):
        found += 1
    return found
