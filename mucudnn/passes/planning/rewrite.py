"""Residencies decided, copies not yet timed: the graph that comes of it, and its gaps.

What is computed again is in the graph a second time, results are in place where they
can be, and for what leaves it is known over which gaps it may be away.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import PERSISTENT, Graph, Phase
from mucudnn.ir.profile import Profile
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.rematerialize import rematerialize
from mucudnn.passes.planning.costs import (
    first_plans,
    profile_of,
    timed_by,
    workspaces_of,
)
from mucudnn.passes.residency import (
    EVERYTHING,
    PERSISTENTS,
    RECOMPUTED,
    SMALL,
    Residency,
    saved_tensors,
)
from mucudnn.passes.scheduling.occupancy import Use, uses_of
from mucudnn.passes.scheduling.problem import Problem

__all__ = ["Rewriter", "Rewritten"]

_REMEMBERED = 8


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A step whose residencies are decided, before its copies are timed.

    Attributes:
        graph: Rematerialized and in-place.
        profile: Of that graph.
        uses: Of its storages.
        idle: Those of them with nodes between two uses.
        swaps: Gaps over which storages may leave.
        away: Parameters and state that must leave in every step.
    """

    graph: Graph
    profile: Profile
    uses: Mapping[str, Use]
    idle: Sequence[Use]
    swaps: Mapping[str, Sequence[tuple[int, int]]]
    away: frozenset[str] = frozenset()

    def problem(self, plans: Mapping[str, ConvPlan], budget: float) -> Problem:
        """What a scheduler decides about, with convolutions planned."""
        return Problem(
            self.graph,
            self.uses,
            self.swaps,
            timed_by(self.profile, plans),
            workspaces_of(self.profile, plans),
            budget,
            self.away,
        )

    def least_peak(self) -> int:
        """Bytes below which these residencies cannot be scheduled."""
        plans = first_plans(self.profile, "least")
        return self.problem(plans, math.inf).least()[1].peak()[0]


class Rewriter:
    """Rewrites one training graph by residencies, time and again.

    What is computed again decides what the graph looks like; the last few of them are
    remembered, because a search changes one residency at a time.

    Args:
        graph: A training graph that nothing has made in-place yet.
        profile: Its costs.
    """

    def __init__(self, graph: Graph, profile: Profile) -> None:
        self._graph = graph
        self._profile = profile
        self._last: tuple[object, Rewritten] | None = None
        self._known: OrderedDict[frozenset[tuple[str, Residency]], Rewritten] = (
            OrderedDict()
        )

    @cached_property
    def _saved(self) -> frozenset[str]:
        return frozenset(saved.name for saved in saved_tensors(self._graph))

    def __call__(
        self, residency: Mapping[str, Residency], hosted: frozenset[str] | None = None
    ) -> Rewritten:
        """A rewritten step.

        Args:
            residency: Of saved tensors; what is left out is kept.
            hosted: Parameters and state that are host-resident: they leave, and no
                others do, whatever residencies say. If None, residencies decide.
        """
        asked = dict(residency), hosted
        if self._last is not None and self._last[0] == asked:
            return self._last[1]
        again = frozenset(
            (name, choice) for name, choice in residency.items() if choice in RECOMPUTED
        )
        if again not in self._known:
            self._known[again] = self._rewritten(dict(again))
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(again)
        ready = self._known[again]
        choices = _Choices(ready.graph, residency, hosted)
        swaps = {u.storage: g for u in ready.idle if (g := choices.gaps(u))}
        away = (hosted or frozenset()) - ready.graph.immovable
        found = replace(ready, swaps=swaps, away=away)
        self._last = asked, found
        return found

    def _rewritten(self, again: Mapping[str, Residency]) -> Rewritten:
        graph = self._graph
        final = in_place(rematerialize(graph, again, self._saved) if again else graph)
        uses = uses_of(final)
        return Rewritten(
            graph=final,
            profile=profile_of(final, self._profile),
            uses=uses,
            idle=[use for use in uses.values() if any(use.gaps())],
            swaps={},
        )


class _Choices:
    """The gaps over which storages leave, by residencies.

    Args:
        graph: In its final order.
        residency: Of tensors, and of what is not named.
        hosted: Parameters and state that leave, if that is decided.
    """

    def __init__(
        self,
        graph: Graph,
        residency: Mapping[str, Residency],
        hosted: frozenset[str] | None,
    ) -> None:
        phases = enumerate(node.phase for node in graph.nodes)
        self._count = len(graph.nodes)
        self._immovable = graph.immovable
        self._boundary = next(
            (i for i, p in phases if p is not Phase.FORWARD), self._count
        )
        self._others = residency.get(EVERYTHING, Residency.KEEP)
        self._persistents = residency.get(PERSISTENTS, Residency.KEEP)
        everything = sum(spec.nbytes for spec in graph.with_role(*PERSISTENT))
        self._small = min(SMALL, everything / 1024)
        self._hosted = hosted
        self._of_storage = {
            graph.storages[name]: choice
            for name, choice in residency.items()
            if name not in (EVERYTHING, PERSISTENTS)
        }

    def gaps(self, use: Use) -> list[tuple[int, int]]:
        """Gaps of one storage, ascending."""
        if use.storage in self._immovable:
            return []
        choice = self._choice(use)
        if choice not in (Residency.OFFLOAD, Residency.PAGE):
            return []
        gaps, page = list(use.gaps()), choice is Residency.PAGE
        if use.persistent:
            return gaps if page else sorted(gaps, key=_length)[-1:]
        inside = [(i, j) for i, j in gaps if j < self._count]
        boundary = self._boundary
        return inside if page else [(i, j) for i, j in inside if i < boundary <= j]

    def _choice(self, use: Use) -> Residency:
        if not use.persistent:
            return self._of_storage.get(use.storage, self._others)
        if self._hosted is None:
            small = use.nbytes < self._small
            others = Residency.KEEP if small else self._persistents
            return self._of_storage.get(use.storage, others)
        return Residency.PAGE if use.storage in self._hosted else Residency.KEEP


def _length(gap: tuple[int, int]) -> int:
    return gap[1] - gap[0]
