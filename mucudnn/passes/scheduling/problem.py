"""Scheduling problem: choose when storages are offloaded and prefetched.

A scheduler turns gaps into residency intervals. With every scheduler the resident bytes
stay within the budget at every node; schedulers differ in how long compute waits for
copies.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.passes.scheduling.intervals import (
    ResidencyInterval,
    Swaps,
    check_fits,
    least_occupancy,
    split,
    unsplit,
)
from mucudnn.passes.scheduling.occupancy import Occupancy, Use

__all__ = ["Problem", "Scheduler", "changes_of"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Input of a scheduler.

    Attributes:
        graph: The graph in its final order.
        uses: Uses of every storage.
        swaps: Gaps over which storages are to be offloaded.
        profile: Times of nodes, and link rates.
        workspaces: Scratch bytes of nodes.
        budget: Budget for everything in bytes.
        away: Parameters and state that must be host-resident.
        changes: Result of `changes_of` for the uses, if known.
    """

    graph: Graph
    uses: Mapping[str, Use]
    swaps: Swaps
    profile: Profile
    workspaces: Mapping[str, int]
    budget: float
    away: frozenset[str] = frozenset()
    changes: Sequence[int] | None = None

    def least(self) -> tuple[list[ResidencyInterval], Occupancy]:
        """Return the shortest intervals, and their ledger.

        Raises:
            PlanningError: They do not fit; has the shortfall and the node.
        """
        occupancy = Occupancy(self._needed(), self.budget)
        if self.graph.nodes:
            peak, position = occupancy.peak()
            check_fits(peak, self.graph.nodes[position].name, self.budget)
        n = len(self.graph.nodes)
        intervals: list[ResidencyInterval] = []
        for use in self.moving():
            gaps = self.swaps.get(use.storage)
            if gaps:
                intervals += split(use, gaps, n)
            else:
                intervals.append(unsplit(use, n))
        return intervals, occupancy

    def need(self) -> tuple[int, str]:
        """Return the peak of the shortest intervals, and its node.

        The result does not depend on the budget; it is cheaper than `least`.
        """
        needed = self._needed()
        most = max(needed, default=0)
        return most, self.graph.nodes[needed.index(most)].name if needed else ""

    def _needed(self) -> list[int]:
        """Return the bytes in use at every node with the shortest intervals."""
        n, uses = len(self.graph.nodes), self.uses
        known = self.changes
        change = [*(changes_of(uses.values(), n) if known is None else known)]
        for name in self.away:
            if name not in self.swaps and name in uses:
                change[0] -= uses[name].nbytes
        for name, gaps in self.swaps.items():
            nbytes = uses[name].nbytes
            for i, j in gaps:
                if j <= n:
                    change[i + 1] -= nbytes
                    change[j] += nbytes
                    continue
                for first, behind in _within_step(i + 1, j, n):
                    change[first] -= nbytes
                    change[behind] += nbytes
        used = itertools.accumulate(change)
        return [a + b for a, b in zip(self.scratch(), used, strict=False)]

    def check(self) -> None:
        """Raise a `PlanningError` if the shortest intervals do not fit."""
        check_fits(*self.need(), self.budget)

    def moving(self) -> Iterator[Use]:
        """Yield the uses of storages that are not always resident."""
        swaps = self.swaps
        for use in self.uses.values():
            if not use.period or use.storage in swaps:
                yield use

    def resident(self) -> int:
        """Return the bytes of parameters and state that are always resident."""
        return sum(
            use.nbytes
            for use in self.uses.values()
            if use.persistent
            and use.storage not in self.swaps
            and use.storage not in self.away
        )

    def scratch(self) -> list[int]:
        """Return the scratch bytes at every node."""
        known = self.workspaces
        return [known.get(node.name, 0) for node in self.graph.nodes]

    def ledger(self, intervals: Sequence[ResidencyInterval]) -> Occupancy:
        """Return the ledger of intervals of all moving storages."""
        return least_occupancy(intervals, self.scratch(), self.resident(), self.budget)


def changes_of(uses: Iterable[Use], count: int) -> list[int]:
    """Return the change of bytes in use at every node, without any offload.

    Args:
        uses: Uses of all storages.
        count: Number of nodes; one more entry holds what is freed at the end.
    """
    change = [0] * (count + 1)
    for _, nbytes, positions, _, period in uses:
        if period:
            change[0] += nbytes
        else:
            change[min(positions[0], count)] += nbytes
            change[min(positions[-1] + 1, count)] -= nbytes
    return change


def _within_step(first: int, behind: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield the half-open ranges of one step that a cyclic range covers."""
    if first < count:
        yield first, min(behind, count)
    if behind > count:
        yield max(first - count, 0), behind - count


class Scheduler(Protocol):
    """A function that decides when copies run."""

    def __call__(self, problem: Problem) -> tuple[list[ResidencyInterval], Occupancy]:
        """Return residency intervals within the budget, and their ledger.

        Raises:
            PlanningError: Nothing fits.
        """
        ...
