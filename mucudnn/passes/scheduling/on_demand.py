"""The scheduler of vDNN: every copy belongs to one layer, and compute waits for it."""

from dataclasses import replace

from mucudnn.passes.scheduling.intervals import Stay
from mucudnn.passes.scheduling.occupancy import Occupancy
from mucudnn.passes.scheduling.problem import Problem

__all__ = ["on_demand"]


def on_demand(problem: Problem) -> tuple[list[Stay], Occupancy]:
    """vDNN: leave with the layer that used it last, return one layer ahead.

    Compute waits at the end of a node until what it offloads has left. A copy back is
    begun with the nearest earlier node of the same phase that has room, and waited for
    at that node's end (vDNN, section 3.2).
    """
    stays, occupancy = problem.least()
    found = []
    for stay in stays:
        start = stay.start
        if stay.copied_in and start > 0 and occupancy.fits(start - 1, stay.nbytes):
            start -= 1
            occupancy.add(start, start, stay.nbytes)
        found.append(stay if start == stay.start else replace(stay, start=start))
    return found, occupancy
