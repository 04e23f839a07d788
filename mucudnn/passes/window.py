"""Schedulers: when what is offloaded leaves, and when it comes back.

Each turns gaps into stays within a budget. What is resident at a node never exceeds
the budget in any of them; they differ in how much compute has to wait for copies.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import Schedule
from mucudnn.passes.occupancy import Occupancy, Use, uses_of
from mucudnn.passes.stays import Stay, Swaps, check, emit, least_occupancy, split
from mucudnn.passes.strategies import Strategies

__all__ = ["SCHEDULERS", "Problem", "Scheduler", "on_demand", "schedule", "timed"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What a scheduler decides about.

    Attributes:
        graph: In its final order.
        uses: Of every storage.
        swaps: Gaps over which storages may leave.
        profile: Times and links.
        workspaces: Node -> bytes of scratch memory.
        resident: Bytes of what never leaves: parameters and state.
        budget: Bytes for everything.
    """

    graph: Graph
    uses: Mapping[str, Use]
    swaps: Swaps
    profile: Profile
    workspaces: Mapping[str, int]
    resident: int
    budget: float

    def least(self) -> tuple[list[Stay], Occupancy]:
        """The shortest stays, and their ledger.

        Raises:
            PlanningError: Not even they fit.
        """
        n = len(self.graph.nodes)
        stays = [
            stay
            for use in self.uses.values()
            if not use.persistent
            for stay in split(use, self.swaps.get(use.storage, ()), n)
        ]
        scratch = [self.workspaces.get(node.name, 0) for node in self.graph.nodes]
        occupancy = least_occupancy(stays, scratch, self.resident, self.budget)
        check(self.graph, occupancy)
        return stays, occupancy


class Scheduler(Protocol):
    """A way to time copies."""

    def __call__(self, problem: Problem) -> tuple[list[Stay], Occupancy]:
        """Stays within the budget, and their ledger.

        Raises:
            PlanningError: Nothing fits.
        """
        ...


SCHEDULERS: Strategies[Scheduler] = Strategies("scheduler")


def schedule(
    graph: Graph,
    swaps: Swaps,
    profile: Profile,
    *,
    workspaces: Mapping[str, int],
    budget: float,
    scheduler: str | Scheduler = "timed",
) -> Schedule:
    """Schedule a graph within a budget.

    Args:
        graph: In its final order, with everything in-place that may be.
        swaps: Storage -> gaps between its uses over which it may leave.
        profile: Of this graph.
        workspaces: Node -> bytes of scratch memory.
        budget: Bytes for everything, parameters and state included.
        scheduler: A name or a function.

    Raises:
        PlanningError: It cannot fit; says how many bytes short, and at which node.
    """
    uses = uses_of(graph)
    resident = sum(use.nbytes for use in uses.values() if use.persistent)
    problem = Problem(graph, uses, swaps, profile, workspaces, resident, budget)
    stays, occupancy = SCHEDULERS.resolve(scheduler)(problem)
    return emit(graph, stays, workspaces, occupancy.peak()[0])


@SCHEDULERS.register
def on_demand(problem: Problem) -> tuple[list[Stay], Occupancy]:
    """VDNN: leave with the layer that used it last, return one layer ahead.

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


@SCHEDULERS.register
def timed(problem: Problem) -> tuple[list[Stay], Occupancy]:
    """Leave and return as the links' time demands, as far as the budget admits.

    What fits over a whole gap stays. A copy out may take until its link has done it;
    a copy back begins just early enough for the link to finish it and those after it
    in time. Where the budget does not admit that, it leaves sooner or returns later,
    and compute waits.
    """
    stays, occupancy = problem.least()
    starts = _start_times(problem)
    stays = _keep_what_fits(stays, occupancy, starts)
    stays = _linger(stays, occupancy, starts, problem.profile)
    stays = _return_early(stays, occupancy, starts, problem.profile)
    return _joined(stays), occupancy


def _start_times(problem: Problem) -> list[float]:
    """When every node would start if nothing had to be waited for, and the end."""
    ms = (problem.profile.node_ms[node.name] for node in problem.graph.nodes)
    return list(itertools.accumulate(ms, initial=0.0))


def _pairs(stays: Sequence[Stay]) -> list[tuple[int, int]]:
    """Indices of stays that one storage leaves from and comes back to."""
    return [
        (i, i + 1)
        for i in range(len(stays) - 1)
        if stays[i + 1].copied_in and stays[i].storage == stays[i + 1].storage
    ]


def _keep_what_fits(
    stays: list[Stay], occupancy: Occupancy, starts: Sequence[float]
) -> list[Stay]:
    """Do not move what has room over its whole gap; the shortest gaps first."""
    found = list(stays)

    def absence(pair: tuple[int, int]) -> float:
        gone, back = found[pair[0]], found[pair[1]]
        return starts[back.start] - starts[gone.stop + 1]

    for i, j in sorted(_pairs(found), key=absence):
        gone, back = found[i], found[j]
        nbytes = gone.nbytes
        if occupancy.fits_over(gone.stop + 1, back.start - 1, nbytes):
            occupancy.add(gone.stop + 1, back.start - 1, nbytes)
            found[i] = replace(gone, stop=back.start - 1)
    return _joined(found)


def _linger(
    stays: list[Stay],
    occupancy: Occupancy,
    starts: Sequence[float],
    profile: Profile,
) -> list[Stay]:
    """Give copies out the time that their link needs, where there is room."""
    found = list(stays)
    returns = {i: found[j].start for i, j in _pairs(found)}
    link_free = delay = 0.0
    leaving = [i for i, stay in enumerate(found) if stay.copied_out]
    for i in sorted(leaving, key=lambda i: found[i].last):
        stay = found[i]
        begin = max(link_free, starts[stay.last + 1] + delay)
        link_free = begin + stay.nbytes / profile.out_bytes_per_ms
        done = bisect.bisect_left(starts, link_free - delay)
        stop = stay.stop
        while stop + 1 < min(done, returns[i], len(occupancy)) and occupancy.fits(
            stop + 1, stay.nbytes
        ):
            stop += 1
        occupancy.add(stay.stop + 1, stop, stay.nbytes)
        delay += max(0.0, link_free - starts[stop + 1] - delay)
        if stop > stay.stop:
            found[i] = replace(stay, stop=stop)
    return found


def _return_early(
    stays: list[Stay],
    occupancy: Occupancy,
    starts: Sequence[float],
    profile: Profile,
) -> list[Stay]:
    """Begin copies back early enough for their link, where there is room."""
    found = list(stays)
    earliest = {j: found[i].stop + 1 for i, j in _pairs(found)}
    coming = sorted(earliest, key=lambda j: found[j].needed)
    wanted: dict[int, int] = {}
    link_busy = float("inf")
    for j in reversed(coming):
        stay = found[j]
        finish = min(starts[stay.needed], link_busy)
        link_busy = finish - stay.nbytes / profile.in_bytes_per_ms
        wanted[j] = max(0, bisect.bisect_right(starts, link_busy) - 1)
    for j in coming:
        stay, start = found[j], found[j].start
        while start > max(wanted[j], earliest[j]) and occupancy.fits(
            start - 1, stay.nbytes
        ):
            start -= 1
        if start < stay.start:
            occupancy.add(start, stay.start - 1, stay.nbytes)
            found[j] = replace(stay, start=start)
    return found


def _joined(stays: Sequence[Stay]) -> list[Stay]:
    """Make one of stays with nothing between them: the copies are cancelled."""
    found: list[Stay] = []
    for stay in stays:
        before = found[-1] if found else None
        if (
            before is not None
            and stay.copied_in
            and before.storage == stay.storage
            and before.stop + 1 >= stay.start
        ):
            found[-1] = replace(
                before,
                stop=stay.stop,
                last=stay.last,
                copied_out=stay.copied_out or (before.copied_out and stay.kept_on_host),
                kept_on_host=stay.kept_on_host,
            )
        else:
            found.append(stay)
    return found
