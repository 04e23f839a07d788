"""Start times of nodes and ideal times of copies, without regard to memory.

Positions are those of nodes, and cyclic. A link makes one copy after another, and
compute never waits.
"""

import bisect
import itertools
import math
from collections.abc import Sequence

from mucudnn.passes.scheduling.intervals import ResidencyInterval

__all__ = ["Clock", "earliest_ends", "latest_starts", "leaving"]


class Clock:
    """Start times of nodes without any waiting, at cyclic positions.

    Args:
        node_ms: Time of each node.

    Attributes:
        count: Number of nodes.
    """

    def __init__(self, node_ms: Sequence[float]) -> None:
        self._starts = list(itertools.accumulate(node_ms, initial=0.0))
        self.count = len(node_ms)

    def start(self, position: int) -> float:
        """Return the start time of a position."""
        if 0 <= position < self.count:
            return self._starts[position]
        step, at = divmod(position, max(1, self.count))
        return step * self._starts[-1] + self._starts[at]

    def two_steps(self) -> list[float]:
        """Return the start times of the nodes of two consecutive steps."""
        *within, end = self._starts
        return [*within, *(end + start for start in within)]

    def after(self, ms: float) -> int:
        """Return the first position that starts at a time or later."""
        step, rest = self._step(ms)
        return step * self.count + bisect.bisect_left(self._starts, rest)

    def before(self, ms: float) -> int:
        """Return the last position that starts at a time or earlier."""
        step, rest = self._step(ms)
        return step * self.count + bisect.bisect_right(self._starts, rest) - 1

    def _step(self, ms: float) -> tuple[int, float]:
        whole = self._starts[-1]
        if 0 <= ms <= whole or not whole:
            return 0, ms
        step = math.floor(ms / whole)
        return step, ms - step * whole


def latest_starts(
    intervals: Sequence[ResidencyInterval], clock: Clock, bytes_per_ms: float
) -> dict[int, int]:
    """Return the latest start (node) of each prefetch that makes compute wait for none.

    Returns:
        Node by index of the interval, in the order of first uses.
    """
    coming = [i for i, interval in enumerate(intervals) if interval.copied_in]
    coming.sort(key=lambda i: intervals[i].needed)
    wanted = []
    link_busy = math.inf
    for i in reversed(coming):
        finish = min(clock.start(intervals[i].needed), link_busy)
        link_busy = finish - intervals[i].nbytes / bytes_per_ms
        wanted.append(clock.before(link_busy))
    return dict(zip(coming, reversed(wanted), strict=True))


def earliest_ends(
    intervals: Sequence[ResidencyInterval], clock: Clock, bytes_per_ms: float
) -> dict[int, int]:
    """Return the earliest node at which each offload is complete.

    Returns:
        Node by index of the interval.
    """
    found = {}
    link_free = -math.inf
    for i in leaving(intervals, clock.count):
        interval = intervals[i]
        later = interval.last - interval.last % clock.count
        begin = max(link_free, clock.start(interval.last - later + 1))
        link_free = begin + interval.nbytes / bytes_per_ms
        found[i] = clock.after(link_free) + later
    return found


def leaving(intervals: Sequence[ResidencyInterval], count: int) -> list[int]:
    """Return indices of intervals with an offload, in the order of last uses."""
    found = [i for i, interval in enumerate(intervals) if interval.copied_out]
    return sorted(found, key=lambda i: intervals[i].last % count)
