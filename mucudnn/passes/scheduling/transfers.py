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

__all__ = ["Clock", "first_ends", "latest_starts"]


class Clock:
    """When nodes start if nothing has to be waited for.

    Positions beyond the last node are those of the next step, negative ones of the
    step before.

    Args:
        node_ms: How long each node takes.
    """

    def __init__(self, node_ms: Sequence[float]) -> None:
        self._starts = list(itertools.accumulate(node_ms, initial=0.0))
        self._count = len(node_ms)

    def start(self, position: int) -> float:
        """When a node starts; the one behind the last with the step's end."""
        step, at = divmod(position, max(1, self._count))
        return step * self._starts[-1] + self._starts[at]

    def after(self, ms: float) -> int:
        """The first node that starts at a moment or later."""
        step, rest = self._step(ms)
        return step * self._count + bisect.bisect_left(self._starts, rest)

    def before(self, ms: float) -> int:
        """The last node that starts at a moment or earlier."""
        step, rest = self._step(ms)
        return step * self._count + bisect.bisect_right(self._starts, rest) - 1

    def _step(self, ms: float) -> tuple[int, float]:
        whole = self._starts[-1]
        if 0 <= ms <= whole or not whole:
            return 0, ms
        step = math.floor(ms / whole)
        return step, ms - step * whole


def latest_starts(
    coming: Sequence[ResidencyInterval], clock: Clock, bytes_per_ms: float
) -> list[int]:
    """Nodes with which copies back should begin, negative ones in the step before.

    Args:
        coming: Intervals that begin with a copy, in the order of their first uses.
        clock: When nodes start.
        bytes_per_ms: Of the link.
    """
    wanted = []
    link_busy = math.inf
    for interval in reversed(coming):
        finish = min(clock.start(interval.needed), link_busy)
        link_busy = finish - interval.nbytes / bytes_per_ms
        wanted.append(clock.before(link_busy))
    return wanted[::-1]


def first_ends(
    leaving: Sequence[ResidencyInterval], clock: Clock, bytes_per_ms: float, count: int
) -> list[int]:
    """The last nodes during which copies out are made.

    Args:
        leaving: Intervals that end with a copy, in the order of their last uses in a
            step.
        clock: When nodes start.
        bytes_per_ms: Of the link.
        count: Nodes of a step.
    """
    ends = []
    link_free = -math.inf
    for interval in leaving:
        later = interval.last - interval.last % count
        begin = max(link_free, clock.start(interval.last - later + 1))
        link_free = begin + interval.nbytes / bytes_per_ms
        ends.append(clock.after(link_free) + later)
    return ends
