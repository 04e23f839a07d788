"""The scheduler of vDNN: every copy belongs to one layer, and compute waits for it."""

from mucudnn.passes.scheduling.intervals import ResidencyInterval
from mucudnn.passes.scheduling.occupancy import Occupancy
from mucudnn.passes.scheduling.problem import Problem

__all__ = ["on_demand"]


def on_demand(problem: Problem) -> tuple[list[ResidencyInterval], Occupancy]:
    """vDNN: leave with the layer that used it last, return one layer ahead.

    Compute waits at the end of a node until what it offloads has left. A copy back is
    begun with the nearest earlier node of the same phase that has room, and waited for
    at that node's end (vDNN, section 3.2).
    """
    intervals, occupancy = problem.least()
    for i, interval in enumerate(intervals):
        before = interval.start - 1
        if (
            interval.copied_in
            and before >= 0
            and occupancy.fits(before, interval.nbytes)
        ):
            occupancy.add(before, before, interval.nbytes)
            intervals[i] = interval._replace(start=before)
    return intervals, occupancy
