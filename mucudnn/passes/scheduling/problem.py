"""The input of a scheduler: `SchedulingProblem`, its node costs and its transfer links.

A scheduler turns gaps into residency intervals. With every scheduler the resident bytes
stay within the budget at every node; schedulers differ in how long compute waits for
copies.
"""

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.ir.profile import Profile
from mucudnn.passes.liveness import Use, rounded
from mucudnn.passes.scheduling.intervals import (
    MemoryLedger,
    ResidencyInterval,
    Swaps,
    check_fits,
    in_period,
    least_occupancy,
    split,
    unsplit,
)


@dataclass(frozen=True, slots=True)
class SchedulingProblem:
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
        whole: Intervals of storages without offload that were made before.
    """

    graph: Graph
    uses: Mapping[str, Use]
    swaps: Swaps
    profile: Profile
    workspaces: Mapping[str, int]
    budget: float
    away: frozenset[str] = frozenset()
    changes: Sequence[int] | None = None
    whole: dict[str, ResidencyInterval] = field(default_factory=dict, repr=False)

    def least(self) -> tuple[list[ResidencyInterval], MemoryLedger]:
        """Return the shortest intervals, and their ledger.

        Raises:
            PlanningError: They do not fit; has the shortfall and the node.
        """
        occupancy, n = self.least_ledger(), len(self.graph.nodes)
        moved = {
            name: split(self.uses[name], gaps, n)
            for name, gaps in self.swaps.items()
            if gaps
        }
        return self.with_unmoved(moved), occupancy

    def least_ledger(self) -> MemoryLedger:
        """Return the ledger of the shortest intervals.

        Raises:
            PlanningError: They do not fit; has the shortfall and the node.
        """
        occupancy = MemoryLedger(self.needed(), self.budget)
        if self.graph.nodes:
            peak, position = occupancy.peak()
            check_fits(peak, self.graph.nodes[position].name, self.budget)
        return occupancy

    def with_unmoved(
        self,
        moved: Mapping[str, Sequence[ResidencyInterval]],
        late: Collection[str] = (),
    ) -> list[ResidencyInterval]:
        """Return intervals of moved storages, and the others' single ones.

        They are in the order of uses, and behind them those of `late` storages.
        """
        whole, n = self.whole, len(self.graph.nodes)
        intervals: list[ResidencyInterval] = []
        behind: list[ResidencyInterval] = []
        swaps = self.swaps
        for storage, use in self.uses.items():
            if storage in moved:
                into = behind if storage in late else intervals
                into += moved[storage]
            elif not use[4] or storage in swaps:  # `use.period`
                if storage not in whole:
                    whole[storage] = unsplit(use, n)
                (behind if storage in late else intervals).append(whole[storage])
        return intervals + behind

    def need(self) -> tuple[int, str]:
        """Return the peak of the shortest intervals, and its node.

        The result does not depend on the budget; it is cheaper than `least`.
        """
        needed = self.needed()
        most = max(needed, default=0)
        return most, self.graph.nodes[needed.index(most)].name if needed else ""

    def needed(self) -> list[int]:
        """Return the bytes in use at every node with the shortest intervals."""
        n, uses = len(self.graph.nodes), self.uses
        known = self.changes
        change = [*(changes_of(uses.values(), n) if known is None else known)]
        # A storage away that no gap brings back occupies nothing.
        for name in self.away:
            if name not in self.swaps and name in uses:
                change[0] -= uses[name].nbytes
        for name, gaps in self.swaps.items():
            nbytes = uses[name].nbytes
            # Free the bytes inside of each gap; a gap may wrap around the step's end.
            for i, j in gaps:
                if j <= n:
                    change[i + 1] -= nbytes
                    change[j] += nbytes
                    continue
                for first, last in in_period(i + 1, j - 1, n):
                    change[first] -= nbytes
                    change[last + 1] += nbytes
        return [*map(operator.add, self.scratch(), itertools.accumulate(change))]

    def check(self) -> None:
        """Raise a `PlanningError` if the shortest intervals do not fit."""
        check_fits(*self.need(), self.budget)

    def moving(self) -> Iterator[Use]:
        """Yield the uses of storages that are not always resident."""
        swaps = self.swaps
        for use in self.uses.values():
            if not use[4] or use[0] in swaps:  # `use.period`, `use.storage`
                yield use

    def resident(self) -> int:
        """Return the bytes of parameters and state that are always resident."""
        swaps, away = self.swaps, self.away
        return sum(
            nbytes
            for storage, nbytes, _, _, period in self.uses.values()
            if period and storage not in swaps and storage not in away
        )

    def scratch(self) -> list[int]:
        """Return the scratch bytes at every node."""
        return [self.workspaces.get(node.name, 0) for node in self.graph.nodes]

    def ledger(self, intervals: Sequence[ResidencyInterval]) -> MemoryLedger:
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


Scheduler = Callable[[SchedulingProblem], tuple[list[ResidencyInterval], MemoryLedger]]
"""Returns residency intervals within the budget, and their ledger.

If nothing fits, it raises a `PlanningError`.
"""


# Times and workspaces of nodes for chosen convolution plans.
#
# A profile covers the original graph. Recomputed nodes of a rewritten graph have the
# costs of their originals.


T = TypeVar("T")


CONVOLUTIONS = ("dynamic", "fastest", "least", "fixed")
"""How convolutions get their workspace: free bytes, as much as they want, the least, or
by given plans."""


def origin(node: str) -> str:
    """Return the original of a recomputed node; the node itself if it is none."""
    return node.partition("~")[0]


def without_others(profile: Profile, graph: Graph) -> Profile:
    """Return a profile restricted to a graph's nodes."""
    names = [node.name for node in graph.nodes]
    if len(names) == len(profile.node_ms):
        return profile

    def known(values: Mapping[str, T]) -> dict[str, T]:
        return {name: values[name] for name in names if name in values}

    return replace(
        profile,
        node_ms={name: profile.node_ms[name] for name in names},
        workspaces=known(profile.workspaces),
        fronts=known(profile.fronts),
        network_ms=known(profile.network_ms),
    )


def profile_of(graph: Graph, profile: Profile) -> Profile:
    """Return a profile with entries for the recomputed nodes of a graph."""
    copies = [node.name for node in graph.nodes if "~" in node.name]
    if not copies:
        return profile
    origins = [(name, origin(name)) for name in copies]
    again = {name: profile.recompute_ms_of(node) for name, node in origins}
    return replace(
        profile,
        node_ms={**profile.node_ms, **again},
        workspaces=_with_copies(profile.workspaces, origins),
        fronts=_with_copies(profile.fronts, origins),
        network_ms=_with_copies(profile.network_ms, origins),
    )


def _with_copies(
    known: Mapping[str, T], origins: Iterable[tuple[str, str]]
) -> dict[str, T]:
    return {**known, **{name: known[node] for name, node in origins if node in known}}


def first_plans(
    profile: Profile, convolutions: str, plans: Mapping[str, ConvPlan] | None = None
) -> dict[str, ConvPlan]:
    """Return the plans to schedule with; `dynamic` plans start small and grow later."""
    if convolutions == "fixed":
        known = plans or {}
        return {name: known[origin(name)] for name in profile.fronts}
    if convolutions == "fastest":
        return {name: fastest_of(front) for name, front in profile.fronts.items()}
    return {name: front[0] for name, front in profile.fronts.items()}


def fastest_of(front: Sequence[ConvPlan]) -> ConvPlan:
    """Return the fastest plan; of equally fast ones, the one with least workspace."""
    return min(front, key=lambda plan: (plan.time_ms, plan.workspace))


def workspaces_of(profile: Profile, plans: Mapping[str, ConvPlan]) -> dict[str, int]:
    """Return the workspace of each node in bytes, that of convolutions by plan."""
    sizes = {name: rounded(size) for name, size in profile.workspaces.items() if size}
    sizes.update((name, rounded(plan.workspace)) for name, plan in plans.items())
    return {name: nbytes for name, nbytes in sizes.items() if nbytes}


def timed_by(profile: Profile, plans: Mapping[str, ConvPlan]) -> Profile:
    """Return a profile with the times of convolution plans."""
    times = dict(profile.node_ms)
    times.update((name, plan.time_ms) for name, plan in plans.items())
    return replace(profile, node_ms=times)


def state_bytes(graph: Graph, names: Iterable[str] | None = None) -> int:
    """Return the bytes of some or all parameters and state."""
    chosen = None if names is None else set(names)
    return sum(
        rounded(spec.nbytes)
        for spec in graph.with_role(*PERSISTENT)
        if chosen is None or spec.name in chosen
    )
