"""Rewrite a step for given residencies, before its copies are scheduled.

Recomputed nodes appear in the graph a second time, results are in place where possible,
and every offloaded storage has the gaps over which it may be absent.
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
    """A step rewritten for residencies, before its copies are scheduled.

    Attributes:
        graph: The rematerialized graph with in-place results.
        profile: Costs of that graph.
        uses: Uses of its storages.
        idle: Uses with gaps, and the gaps, of all movable storages.
        changes: Change of bytes in use at every node without offload; see `Problem`.
        swaps: Gaps over which storages are offloaded.
        away: Host-resident parameters and state.
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
        """Position of the first node after the forward pass."""
        phases = enumerate(node.phase for node in self.graph.nodes)
        behind = (i for i, phase in phases if phase is not Phase.FORWARD)
        return next(behind, len(self.graph.nodes))

    def problem(self, plans: Mapping[str, ConvPlan], budget: float) -> Problem:
        """Return the scheduling problem for given convolution plans."""
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
        """Return the ledger of the least bytes at every node, without a budget."""
        plans = first_plans(self.profile, "least")
        return self.problem(plans, math.inf).least()[1]

    def least_peak(self) -> int:
        """Return the bytes below which these residencies cannot be scheduled."""
        return self.least().peak()[0]


class Rewriter:
    """Rewriter of one training graph for many residencies.

    The recomputed tensors determine the graph. The last few graphs are cached, because
    a search changes one residency at a time.
    """

    def __init__(self, graph: Graph, profile: Profile) -> None:
        self._rematerialize = Rematerializer(graph)
        self._profile = without_others(profile, graph)
        self._own_ms = sum(self._profile.node_ms.values())
        self._last: tuple[object, Rewritten] | None = None
        self._needs: dict[object, tuple[int, str]] = {}
        self._known: OrderedDict[frozenset[tuple[str, Residency]], _Rematerialized] = (
            OrderedDict()
        )

    def __call__(
        self, residency: Mapping[str, Residency], hosted: frozenset[str] | None = None
    ) -> Rewritten:
        """Return the step rewritten for residencies.

        Args:
            residency: Residencies of saved tensors; missing tensors are kept.
            hosted: Exactly those parameters and state that are host-resident; None to
                let residencies decide.
        """
        key = dict(residency), hosted
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        ready = self._rematerialized(residency).rewritten
        swaps = _swaps(ready, residency, hosted)
        away = (hosted or frozenset()) - ready.graph.immovable
        found = replace(ready, swaps=swaps, away=away)
        self._last = key, found
        return found

    def need(
        self,
        residency: Mapping[str, Residency],
        hosted: frozenset[str] | None,
        convolutions: str,
        plans: Mapping[str, ConvPlan] | None = None,
    ) -> tuple[int, str]:
        """Return the least bytes that residencies need, and the critical node.

        The result does not depend on the budget and is cached unless plans are fixed.
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
        """Return the nodes of the rematerialized graph."""
        return self._rematerialized(residency).graph.nodes

    def compute_ms(self, residency: Mapping[str, Residency]) -> float:
        """Return the compute time of those nodes, each at its fastest."""
        return self._own_ms + self._rematerialized(residency).copies_ms

    def _rematerialized(self, residency: Mapping[str, Residency]) -> "_Rematerialized":
        again = frozenset(
            (name, choice) for name, choice in residency.items() if choice in RECOMPUTED
        )
        if again not in self._known:
            self._known[again] = _Rematerialized(
                self._rematerialize(dict(again)), self._profile
            )
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(again)
        return self._known[again]


class _Rematerialized:
    """A rematerialized graph, with cached results derived from it."""

    def __init__(self, graph: Graph, profile: Profile) -> None:
        self.graph = graph
        self._profile = profile

    @cached_property
    def copies_ms(self) -> float:
        """Time of the recomputed nodes, each at its fastest."""
        names = (node.name for node in self.graph.nodes if "~" in node.name)
        return sum(self._profile.again_ms(origin(name)) for name in names)

    @cached_property
    def rewritten(self) -> Rewritten:
        """The step with in-place results and no offload."""
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
    """Return the gaps over which residencies offload storages."""
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
    """Return the gaps over which one storage is offloaded, ascending."""
    # With micro-batches, forward nodes may follow the backward nodes of another part.
    count = len(forward)
    if choice is Residency.PAGE:
        within = use.persistent or gaps[-1][1] < count
        return gaps if within else [(i, j) for i, j in gaps if j < count]
    if use.persistent:
        return sorted(gaps, key=lambda gap: gap[1] - gap[0])[-1:]
    return [(i, j) for i, j in gaps if j < count and forward[i] and not forward[j]]
