"""Schedulers: when what is offloaded leaves, and when it comes back.

Each turns gaps into stays within a budget. What is resident at a node never exceeds
the budget in any of them; they differ in how much compute has to wait for copies.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import Schedule
from mucudnn.passes.scheduling.intervals import (
    Stay,
    Swaps,
    check,
    emit,
    least_occupancy,
    split,
)
from mucudnn.passes.scheduling.occupancy import Occupancy, Use, uses_of
from mucudnn.passes.strategies import Strategies

__all__ = ["SCHEDULERS", "Problem", "Scheduler", "on_demand", "schedule"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What a scheduler decides about.

    Attributes:
        graph: In its final order.
        uses: Of every storage.
        swaps: Gaps over which storages may leave.
        profile: Times and links.
        workspaces: Node -> bytes of scratch memory.
        budget: Bytes for everything.
        away: Those that outlive the step and must leave the device in every step.
    """

    graph: Graph
    uses: Mapping[str, Use]
    swaps: Swaps
    profile: Profile
    workspaces: Mapping[str, int]
    budget: float
    away: frozenset[str] = frozenset()

    def least(self) -> tuple[list[Stay], Occupancy]:
        """The shortest stays, and their ledger.

        Raises:
            PlanningError: Not even they fit.
        """
        n = len(self.graph.nodes)
        stays = [
            stay
            for use in self.moving()
            for stay in split(use, self.swaps.get(use.storage, ()), n)
        ]
        occupancy = self.ledger(stays)
        check(self.graph, occupancy)
        return stays, occupancy

    def moving(self) -> Iterator[Use]:
        """Uses of what is not on the device all the time."""
        for use in self.uses.values():
            if not use.persistent or use.storage in self.swaps:
                yield use

    def resident(self) -> int:
        """Bytes of what never leaves: parameters and state."""
        return sum(
            use.nbytes
            for use in self.uses.values()
            if use.persistent
            and use.storage not in self.swaps
            and use.storage not in self.away
        )

    def scratch(self) -> list[int]:
        """Bytes of scratch memory at every node."""
        return [self.workspaces.get(node.name, 0) for node in self.graph.nodes]

    def ledger(self, stays: Sequence[Stay]) -> Occupancy:
        """Bytes in use at every node with stays of all that moves."""
        return least_occupancy(stays, self.scratch(), self.resident(), self.budget)


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
    problem = Problem(graph, uses_of(graph), swaps, profile, workspaces, budget)
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
