"""What a scheduler decides about: when storages are swapped out and in again.

Each scheduler turns gaps into residency intervals within a budget. What is resident at
a node never exceeds the budget in any of them; they differ in how much compute has to
wait for copies.
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
    least_occupancy,
    refuse_more,
    split,
    unsplit,
)
from mucudnn.passes.scheduling.occupancy import Occupancy, Use

__all__ = ["Problem", "Scheduler", "changes_of"]


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
        changes: What `changes_of` the uses are, if that is known.
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
        """The shortest intervals, and their ledger.

        Raises:
            PlanningError: Not even they fit; says how many bytes short, and where.
        """
        occupancy = Occupancy(self._needed(), self.budget)
        refuse_more(*self._most(occupancy), self.budget)
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
        """Bytes that the shortest intervals need, and at which node they do.

        No budget changes it. It takes less time than `least`: it makes no intervals.
        """
        needed = self._needed()
        most = max(needed, default=0)
        return most, self.graph.nodes[needed.index(most)].name if needed else ""

    def _needed(self) -> list[int]:
        """Bytes in use at every node with the shortest intervals."""
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
        """Refuse what `least` refuses.

        Raises:
            PlanningError: Not even the shortest intervals fit.
        """
        refuse_more(*self.need(), self.budget)

    def _most(self, occupancy: Occupancy) -> tuple[int, str]:
        peak, position = occupancy.peak()
        return peak, self.graph.nodes[position].name if self.graph.nodes else ""

    def moving(self) -> Iterator[Use]:
        """Uses of what is not on the device all the time."""
        swaps = self.swaps
        for use in self.uses.values():
            if not use.period or use.storage in swaps:
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
        known = self.workspaces
        return [known.get(node.name, 0) for node in self.graph.nodes]

    def ledger(self, intervals: Sequence[ResidencyInterval]) -> Occupancy:
        """Bytes in use at every node with intervals of all that moves."""
        return least_occupancy(intervals, self.scratch(), self.resident(), self.budget)


def changes_of(uses: Iterable[Use], count: int) -> list[int]:
    """Bytes that come with every node, less those that went before it.

    While nothing leaves: what outlives the step is there all the time.

    Args:
        uses: Of all storages.
        count: Of nodes; what remains at the end goes behind them.
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
    """Positions of a step from one up to before another, which may be in the next."""
    if first < count:
        yield first, min(behind, count)
    if behind > count:
        yield max(first - count, 0), behind - count


class Scheduler(Protocol):
    """A way to time copies."""

    def __call__(self, problem: Problem) -> tuple[list[ResidencyInterval], Occupancy]:
        """Residency intervals within the budget, and their ledger.

        Raises:
            PlanningError: Nothing fits.
        """
        ...
