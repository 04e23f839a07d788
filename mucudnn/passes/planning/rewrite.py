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
from mucudnn.ir.graph import PERSISTENT, Graph, Node, Phase
from mucudnn.ir.profile import Profile
from mucudnn.passes.graph.inplace import in_place_with_uses
from mucudnn.passes.graph.rematerialize import Rematerializer
from mucudnn.passes.residency import (
    EVERYTHING,
    PERSISTENTS,
    RECOMPUTED,
    SMALL,
    Residency,
)
from mucudnn.passes.scheduling.costs import (
    first_plans,
    origin,
    profile_of,
    timed_by,
    without_others,
    workspaces_of,
)
from mucudnn.passes.scheduling.intervals import Swaps
from mucudnn.passes.scheduling.occupancy import Occupancy, Use
from mucudnn.passes.scheduling.problem import Problem, changes_of

__all__ = ["Rewriter", "Rewritten"]

_REMEMBERED = 16

_LEAVING = (Residency.OFFLOAD, Residency.PAGE)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A step whose residencies are decided, before its copies are timed.

    Attributes:
        graph: Rematerialized and in-place.
        profile: Of that graph.
        uses: Of its storages.
        idle: Those of them that may leave between two uses, and those gaps.
        changes: Of bytes at every node while nothing leaves: see `Problem`.
        swaps: Gaps over which storages may leave.
        away: Parameters and state that must leave in every step.
    """

    graph: Graph
    profile: Profile
    uses: Mapping[str, Use]
    idle: Sequence[tuple[Use, Sequence[tuple[int, int]]]]
    changes: Sequence[int]
    swaps: Swaps
    away: frozenset[str] = frozenset()

    @property
    def boundary(self) -> int:
        """Position of the first node behind the forward pass."""
        phases = enumerate(node.phase for node in self.graph.nodes)
        behind = (i for i, phase in phases if phase is not Phase.FORWARD)
        return next(behind, len(self.graph.nodes))

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
            self.changes,
        )

    def least(self) -> Occupancy:
        """Bytes that these residencies need at every node, workspaces at their least.

        It is a ledger without a budget.
        """
        plans = first_plans(self.profile, "least")
        return self.problem(plans, math.inf).least()[1]

    def least_peak(self) -> int:
        """Bytes below which these residencies cannot be scheduled."""
        return self.least().peak()[0]


class Rewriter:
    """Rewrites one training graph by residencies, time and again.

    What is computed again decides what the graph looks like; the last few of them are
    remembered, because a search changes one residency at a time.

    Args:
        graph: A training graph that nothing has made in-place yet.
        profile: Its costs.
    """

    def __init__(self, graph: Graph, profile: Profile) -> None:
        self._rematerialize = Rematerializer(graph)
        self._profile = without_others(profile, graph)
        self._last: tuple[object, Rewritten] | None = None
        self._needs: dict[object, tuple[int, str]] = {}
        self._known: OrderedDict[frozenset[tuple[str, Residency]], _Again] = (
            OrderedDict()
        )

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
        ready = self._again(residency).rewritten
        swaps = _swaps(ready, residency, hosted)
        away = (hosted or frozenset()) - ready.graph.immovable
        found = replace(ready, swaps=swaps, away=away)
        self._last = asked, found
        return found

    def need(
        self,
        residency: Mapping[str, Residency],
        hosted: frozenset[str] | None,
        convolutions: str,
        plans: Mapping[str, ConvPlan] | None = None,
    ) -> tuple[int, str]:
        """Bytes that residencies need at the least, and at which node.

        No budget changes that, so it is remembered; not so with plans of convolutions.

        Args:
            residency: Of saved tensors.
            hosted: As for a call.
            convolutions: How they get their workspace.
            plans: Those of theirs, if that is `fixed`.
        """
        key = frozenset(residency.items()), hosted, convolutions
        if key in self._needs:
            return self._needs[key]
        ready = self(residency, hosted)
        first = first_plans(ready.profile, convolutions, plans)
        found = ready.problem(first, math.inf).need()
        if convolutions != "fixed":
            self._needs[key] = found
        return found

    def nodes(self, residency: Mapping[str, Residency]) -> tuple[Node, ...]:
        """What runs with residencies, copies included; known before all the rest."""
        return self._again(residency).graph.nodes

    def compute_ms(self, residency: Mapping[str, Residency]) -> float:
        """What those nodes take, each as fast as it can."""
        return self._own_ms + self._again(residency).copies_ms

    @cached_property
    def _own_ms(self) -> float:
        return sum(self._profile.node_ms.values())

    def _again(self, residency: Mapping[str, Residency]) -> "_Again":
        again = frozenset(
            (name, choice) for name, choice in residency.items() if choice in RECOMPUTED
        )
        if again not in self._known:
            self._known[again] = _Again(self._rematerialize(dict(again)), self._profile)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(again)
        return self._known[again]


class _Again:
    """A graph with what is computed again in it, and what follows from that.

    Args:
        graph: Rematerialized.
        profile: Of the graph that it is made of.
    """

    def __init__(self, graph: Graph, profile: Profile) -> None:
        self.graph = graph
        self._profile = profile

    @cached_property
    def copies_ms(self) -> float:
        """What runs again takes, as fast as it can."""
        names = (node.name for node in self.graph.nodes if "~" in node.name)
        return sum(self._profile.again_ms(origin(name)) for name in names)

    @cached_property
    def rewritten(self) -> Rewritten:
        """The step in place, while nothing leaves."""
        final, uses = in_place_with_uses(self.graph)
        fixed = final.immovable
        idle = [(u, gaps) for u in uses.values() if (gaps := u.gaps())]
        return Rewritten(
            graph=final,
            profile=profile_of(final, self._profile),
            uses=uses,
            idle=[(u, gaps) for u, gaps in idle if u.storage not in fixed],
            changes=changes_of(uses.values(), len(final.nodes)),
            swaps={},
        )


def _swaps(
    ready: Rewritten,
    residency: Mapping[str, Residency],
    hosted: frozenset[str] | None,
) -> Swaps:
    """The gaps over which storages leave, by residencies."""
    graph = ready.graph
    forward = [node.phase is Phase.FORWARD for node in graph.nodes]
    chosen = {
        graph.storages[name]: choice
        for name, choice in residency.items()
        if name not in (EVERYTHING, PERSISTENTS)
    }
    others = residency.get(EVERYTHING, Residency.KEEP)
    persistents = residency.get(PERSISTENTS, Residency.KEEP)
    everything = sum(spec.nbytes for spec in graph.with_role(*PERSISTENT))
    small = min(SMALL, everything / 1024)
    found = {}
    for use, gaps in ready.idle:
        storage, nbytes, _, _, period = use
        if not period:
            choice = chosen.get(storage, others)
        elif hosted is None:
            default = Residency.KEEP if nbytes < small else persistents
            choice = chosen.get(storage, default)
        else:
            choice = Residency.PAGE if storage in hosted else Residency.KEEP
        if choice in _LEAVING and (over := _leaves_over(use, gaps, choice, forward)):
            found[storage] = over
    return found


def _leaves_over(
    use: Use,
    gaps: Sequence[tuple[int, int]],
    choice: Residency,
    forward: Sequence[bool],
) -> Sequence[tuple[int, int]]:
    """Gaps of one storage over which it leaves, ascending.

    Args:
        use: Of the storage.
        gaps: All of its gaps.
        choice: What was decided about it, of what leaves.
        forward: Of every node, whether it is of the forward pass. Where a step runs
            in parts, that of one part may come behind the backward pass of another.
    """
    count = len(forward)
    if choice is Residency.PAGE:
        within = use.persistent or gaps[-1][1] < count
        return gaps if within else [(i, j) for i, j in gaps if j < count]
    if use.persistent:
        return sorted(gaps, key=lambda gap: gap[1] - gap[0])[-1:]
    return [(i, j) for i, j in gaps if j < count and forward[i] and not forward[j]]
