"""When nodes start, and when copies have to begin and are done.

Positions are those of nodes, and cyclic: every step takes as long. A link
makes one copy after the other; nobody is kept waiting. That is how a schedule would
like it; what memory admits is another matter.
"""

import bisect
import itertools
import math
from collections.abc import Sequence

from mucudnn.passes.scheduling.intervals import ResidencyInterval

__all__ = ["Clock", "first_ends", "latest_starts", "leaving"]


class Clock:
    """When nodes start if nothing has to be waited for.

    Positions beyond the last node are those of the next step, negative ones of the
    step before.

    Args:
        node_ms: How long each node takes.

    Attributes:
        count: How many nodes there are.
    """

    def __init__(self, node_ms: Sequence[float]) -> None:
        self._starts = list(itertools.accumulate(node_ms, initial=0.0))
        self.count = len(node_ms)

    def start(self, position: int) -> float:
        """When a node starts; the one behind the last with the step's end."""
        if 0 <= position < self.count:
            return self._starts[position]
        step, at = divmod(position, max(1, self.count))
        return step * self._starts[-1] + self._starts[at]

    def two_steps(self) -> list[float]:
        """When the nodes of two steps in a row start."""
        *within, end = self._starts
        return [*within, *(end + start for start in within)]

    def after(self, ms: float) -> int:
        """The first node that starts at a moment or later."""
        step, rest = self._step(ms)
        return step * self.count + bisect.bisect_left(self._starts, rest)

    def before(self, ms: float) -> int:
        """The last node that starts at a moment or earlier."""
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
    """Nodes with which copies back should begin, negative ones in the step before.

    Args:
        intervals: Those that begin with a copy are looked at.
        clock: When nodes start.
        bytes_per_ms: Of the link.

    Returns:
        Index of an interval -> node, in the order of first uses.
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


def first_ends(
    intervals: Sequence[ResidencyInterval], clock: Clock, bytes_per_ms: float
) -> dict[int, int]:
    """The last nodes during which copies out are made.

    Args:
        intervals: Those that end with a copy are looked at.
        clock: When nodes start.
        bytes_per_ms: Of the link.

    Returns:
        Index of an interval -> node.
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
    """Indices of intervals that end with a copy, in the order of their last uses.

    Args:
        intervals: Of a step.
        count: Nodes of it.
    """
    found = [i for i, interval in enumerate(intervals) if interval.copied_out]
    return sorted(found, key=lambda i: intervals[i].last % count)
