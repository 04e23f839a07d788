"""When copies have to begin, and when they are done: a link makes one after the other.

Positions are those of nodes and go round; nobody is kept waiting. That is how a
schedule would like it; what memory admits is another matter.
"""

import math
from collections.abc import Sequence

from mucudnn.passes.scheduling.clock import Clock
from mucudnn.passes.scheduling.intervals import Stay

__all__ = ["first_ends", "latest_starts"]


def latest_starts(
    coming: Sequence[Stay], clock: Clock, bytes_per_ms: float
) -> list[int]:
    """Nodes with which copies back should begin, negative ones in the step before.

    Args:
        coming: Stays that begin with a copy, in the order of their first uses.
        clock: When nodes start.
        bytes_per_ms: Of the link.
    """
    wanted = []
    link_busy = math.inf
    for stay in reversed(coming):
        finish = min(clock.start(stay.needed), link_busy)
        link_busy = finish - stay.nbytes / bytes_per_ms
        wanted.append(clock.before(link_busy))
    return wanted[::-1]


def first_ends(
    leaving: Sequence[Stay], clock: Clock, bytes_per_ms: float, count: int
) -> list[int]:
    """The last nodes during which copies out are made.

    Args:
        leaving: Stays that end with a copy, in the order of their last uses within a
            step.
        clock: When nodes start.
        bytes_per_ms: Of the link.
        count: Nodes of a step.
    """
    ends = []
    link_free = -math.inf
    for stay in leaving:
        later = stay.last - stay.last % count
        begin = max(link_free, clock.start(stay.last - later + 1))
        link_free = begin + stay.nbytes / bytes_per_ms
        ends.append(clock.after(link_free) + later)
    return ends
