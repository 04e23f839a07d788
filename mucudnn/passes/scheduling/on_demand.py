"""Scheduler of vDNN: every copy belongs to one layer, and compute waits for it."""

from mucudnn.passes.scheduling.intervals import ResidencyInterval
from mucudnn.passes.scheduling.occupancy import Occupancy
from mucudnn.passes.scheduling.problem import Problem

__all__ = ["on_demand"]


def on_demand(problem: Problem) -> tuple[list[ResidencyInterval], Occupancy]:
    """Offload with the layer of the last use, and prefetch one layer ahead.

    Compute waits at the end of a node for the node's offloads. A prefetch starts with
    the node before the one that needs it, if there is room (vDNN, section 3.2).
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
