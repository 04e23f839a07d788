"""`StepRequest`, the rewritten step that it asks for, and plans of residencies.

Without a budget, the budget is infinity.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mucudnn.arguments import check_choice, check_number, check_type
from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import PERSISTENT, Graph, Node, Phase
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import PLACEMENTS, STATIC, VIRTUAL
from mucudnn.ir.sizes import parse_bytes
from mucudnn.passes.graph.inplace import in_place_with_uses
from mucudnn.passes.graph.rematerialize import (
    Insertions,
    RecomputeChains,
    Rematerializer,
    recompute_chains,
)
from mucudnn.passes.liveness import ALIGNMENT, Touches, Use, rounded, uses_of
from mucudnn.passes.registry import name_of
from mucudnn.passes.residency import (
    EVERYTHING,
    PERSISTENTS,
    PLANNED,
    RECOMPUTED,
    SMALL,
    VDNN_DYN,
    Residency,
    ResidencyPolicy,
    check_policy,
    check_residencies,
)
from mucudnn.passes.residency.candidates import Candidate, candidates_of
from mucudnn.passes.scheduling import SCHEDULERS, Scheduler, intervals_of
from mucudnn.passes.scheduling.collectives import overlap, under_way
from mucudnn.passes.scheduling.intervals import (
    MemoryLedger,
    ResidencyInterval,
    Swaps,
    check_fits,
    emit,
    shifted,
)
from mucudnn.passes.scheduling.problem import (
    CONVOLUTIONS,
    SchedulingProblem,
    changes_of,
    first_plans,
    origin,
    profile_of,
    timed_by,
    without_others,
    workspaces_of,
)
from mucudnn.passes.scheduling.schedulers import Clock, trim_to_copies
from mucudnn.passes.scheduling.step_plan import StepPlan, step_ms
from mucudnn.passes.simulate import simulate

_Ranked = dict[int, tuple[Sequence[ConvPlan], object]]
"""Plans of each front by id, the fastest first, and the front, which keeps its id."""

_LEAVING = (Residency.OFFLOAD, Residency.PAGE)


class _Known:
    """Results that depend on a rewritten graph only, but not on what is offloaded."""

    def __init__(self, ranked: "_Ranked | None" = None) -> None:
        self.ranked = {} if ranked is None else ranked
        self.first: dict[str, Mapping[str, ConvPlan]] = {}
        self.plans: Mapping[str, ConvPlan] | None = None  # of the next two
        self.timed: Profile | None = None
        self.workspaces: Mapping[str, int] = {}
        self.gaps: Mapping[Residency, dict[str, Sequence[tuple[int, int]]]] = {
            choice: {} for choice in _LEAVING
        }
        self.unsplit: dict[str, ResidencyInterval] = {}
        self.moveable: Sequence[Use] | None = None
        self.convolutions: list[tuple[int, str, Sequence[ConvPlan]]] | None = None


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A step rewritten for residencies, before its copies are scheduled.

    Attributes:
        graph: The rematerialized graph with in-place results.
        profile: Costs of that graph.
        uses: Uses of its storages.
        changes: Change of bytes in use at every node without offload (`changes_of`).
        swaps: Gaps over which storages are offloaded.
        away: Host-resident parameters and state.
        known: Results that depend on the graph only, shared by its residencies.
    """

    graph: Graph
    profile: Profile
    uses: Mapping[str, Use]
    changes: Sequence[int]
    swaps: Swaps
    away: frozenset[str] = frozenset()
    known: "_Known" = field(default_factory=lambda: _Known(), repr=False)

    @property
    def boundary(self) -> int:
        """Position of the first node after the forward pass."""
        phases = enumerate(node.phase for node in self.graph.nodes)
        behind = (i for i, phase in phases if phase is not Phase.FORWARD)
        return next(behind, len(self.graph.nodes))

    def problem(
        self, plans: Mapping[str, ConvPlan], budget: float
    ) -> SchedulingProblem:
        """Return the scheduling problem for given convolution plans."""
        if self.known.plans is not plans:
            self.known.plans = plans
            self.known.timed = timed_by(self.profile, plans)
            self.known.workspaces = workspaces_of(self.profile, plans)
        return SchedulingProblem(
            self.graph,
            self.uses,
            self.swaps,
            self.known.timed or self.profile,
            self.known.workspaces,
            budget,
            self.away,
            self.changes,
            self.known.unsplit,
        )

    def first_plans(
        self, convolutions: str, plans: Mapping[str, ConvPlan] | None = None
    ) -> Mapping[str, ConvPlan]:
        """Return the convolution plans to schedule with; see `first_plans`."""
        if convolutions == "fixed":
            return first_plans(self.profile, convolutions, plans)
        first = self.known.first
        if convolutions not in first:
            first[convolutions] = first_plans(self.profile, convolutions)
        return first[convolutions]

    def moveable(self) -> Sequence[Use]:
        """Return the uses of storages with gaps over which they can be offloaded."""
        if self.known.moveable is None:
            fixed = self.graph.immovable
            self.known.moveable = [
                use
                for storage, use in self.uses.items()
                for at in [use[2]]
                if at and storage not in fixed
                if use[4] or at[-1] - at[0] >= len(at)
            ]
        return self.known.moveable

    def convolutions(self) -> Sequence[tuple[int, str, Sequence[ConvPlan]]]:
        """Return position, name, and plans by ascending time of every convolution."""
        known, fronts = self.known, self.profile.fronts
        if known.convolutions is None:
            known.convolutions = []
            for position, node in enumerate(self.graph.nodes) if fronts else ():
                front = fronts.get(node.name)
                if front is None:
                    continue
                if id(front) not in known.ranked:
                    best = sorted(
                        front, key=lambda plan: (plan.time_ms, plan.workspace)
                    )
                    known.ranked[id(front)] = best, front
                ranked = known.ranked[id(front)][0]
                known.convolutions.append((position, node.name, ranked))
        return known.convolutions

    def least(self) -> MemoryLedger:
        """Return the ledger of the least bytes at every node, without a budget."""
        return self.problem(self.first_plans("least"), math.inf).least()[1]

    def least_peak(self) -> int:
        """Return the bytes below which these residencies cannot be scheduled."""
        return self.least().peak()[0]


@dataclass(frozen=True)
class StepRequest:
    """A training step with its costs and the way it is to be planned.

    Residency policies are functions of a request.

    Attributes:
        graph: A training graph before in-place rewriting.
        profile: Costs of all nodes of the graph.
        budget: Bytes for everything, parameters and state included; a size such as
            "1.5GiB" is parsed. Infinity means no budget.
        policy: What is offloaded and recomputed: one of `policy_names`, or a function
            of this request.
        scheduler: When copies run: a name or a function. None means `on_demand` for
            vDNN's dynamic policy, any scheduler for the search, else `timed`.
        convolutions: How convolutions get their workspace: `dynamic` (free bytes at
            each), `fastest` (as much as they want), `least`, or `fixed`.
        plans: Plan of each convolution node, for `fixed`.
        hosted: Names of exactly those parameters and state that are host-resident, if
            another step that shares them has decided. Unknown names are ignored.
        seed: Further residencies that the search of `planned` starts from, such as
            those of a previous plan. Other policies ignore it.
        placement: One of `PLACEMENTS`; `virtual` needs the profile of a device with
            mappable memory.

    Raises:
        ValueError: A name or a size is invalid, the profile or the plans are of another
            graph, or the device cannot map memory.
        TypeError: A field has another type.
    """

    graph: Graph = field(repr=False)
    profile: Profile = field(repr=False)
    budget: float = math.inf
    policy: str | ResidencyPolicy = PLANNED
    scheduler: str | Scheduler | None = None
    convolutions: str = "dynamic"
    plans: Mapping[str, ConvPlan] | None = field(default=None, repr=False)
    hosted: frozenset[str] | None = None
    seed: Mapping[str, Residency] | None = None
    placement: str = STATIC

    def __post_init__(self) -> None:
        check_type(
            "graph", self.graph, Graph, "a Graph, such as training_graph() returns"
        )
        check_type(
            "profile", self.profile, Profile, "a Profile, such as estimate() makes"
        )
        _refuse_missing(
            "profile", "nodes", {n.name for n in self.graph.nodes}, self.profile.node_ms
        )
        object.__setattr__(self, "budget", _budget(self.budget))
        check_policy(self.policy)
        if self.scheduler is not None:
            SCHEDULERS.resolve(self.scheduler)
        check_choice("convolutions", self.convolutions, CONVOLUTIONS)
        if self.plans is not None:
            check_type("plans", self.plans, Mapping, "a mapping from nodes to plans")
        if self.convolutions == "fixed":
            if self.plans is None:
                raise ValueError("fixed convolutions need their plans")
            fronts = set(self.profile.fronts)
            _refuse_missing("plans", "convolutions", fronts, self.plans)
        if self.hosted is not None:
            check_type("hosted", self.hosted, frozenset, "a frozenset of names")
        check_choice("placement", self.placement, PLACEMENTS)
        if self.placement == VIRTUAL and self.profile.mapping_costs is None:
            raise ValueError(
                "virtual placement needs a device that can map memory; the profile's "
                "device cannot, or the profile lacks the chunk size"
            )
        if self.seed is not None:
            check_type(
                "seed", self.seed, Mapping, "a mapping from tensors to residencies"
            )
            check_residencies("seed", self.seed, self.graph)

    @cached_property
    def timing(self) -> str | Scheduler:
        """The scheduler, by default that of the policy."""
        if self.scheduler is not None:
            return self.scheduler
        return "on_demand" if self.policy == VDNN_DYN else "timed"

    @cached_property
    def persistent(self) -> frozenset[str]:
        """Names of the parameters and state that may be host-resident."""
        names = frozenset(spec.name for spec in self.graph.with_role(*PERSISTENT))
        return names - self.graph.immovable

    @property
    def grows(self) -> bool:
        """True if convolutions may use free gaps of the layout."""
        return self.convolutions == "dynamic" and self.policy != VDNN_DYN

    def rewritten(self, residency: Mapping[str, Residency]) -> Rewritten:
        """Return the step rewritten for residencies, before copies are scheduled."""
        return self._rewriter(residency, self.hosted)

    def nodes(self, residency: Mapping[str, Residency]) -> tuple[Node, ...]:
        """Return the nodes of the step with residencies; cheaper than `rewritten`."""
        return self._rewriter.nodes(residency)

    def compute_ms(self, residency: Mapping[str, Residency]) -> float:
        """Return the compute time with residencies, each node at its fastest."""
        return self._rewriter.compute_ms(residency)

    def need(self, residency: Mapping[str, Residency]) -> tuple[int, str]:
        """Return the least bytes that residencies need, and the critical node."""
        return self._rewriter.need(
            residency, self.hosted, self.convolutions, self.plans
        )

    def within(self, budget: float) -> "StepRequest":
        """Return the request with another budget."""
        return self._sharing(replace(self, budget=budget))

    def planned_by(self, policy: str | ResidencyPolicy) -> "StepRequest":
        """Return the request with another policy."""
        return self._sharing(replace(self, policy=policy))

    def scheduled(self, scheduler: str | Scheduler) -> "StepRequest":
        """Return the request with another scheduler."""
        return self._sharing(replace(self, scheduler=scheduler))

    def convolving(
        self, convolutions: str, plans: Mapping[str, ConvPlan] | None = None
    ) -> "StepRequest":
        """Return the request with convolutions chosen in another way."""
        return self._sharing(replace(self, convolutions=convolutions, plans=plans))

    def hosting(self, hosted: frozenset[str] | None) -> "StepRequest":
        """Return the request with these host-resident parameters and state."""
        return self._sharing(replace(self, hosted=hosted))

    @property
    def candidates(self) -> Sequence[Candidate]:
        """Saved tensors worth a decision; found once for all requests of a graph."""
        known = self._rewriter
        if known.candidates is None:
            known.candidates = candidates_of(self)
        return known.candidates

    @property
    def chains(self) -> RecomputeChains:
        """Recompute chains of the graph; found once for all requests of it."""
        return self._rewriter.chains

    @cached_property
    def _rewriter(self) -> "Rewriter":
        return Rewriter(self.graph, self.profile)

    def _sharing(self, other: "StepRequest") -> "StepRequest":
        """Let another request for the same graph share this one's cached rewriter."""
        other.__dict__["_rewriter"] = self._rewriter
        return other


def _budget(budget: float | str) -> float:
    if isinstance(budget, str):
        return parse_bytes(budget)
    check_number("budget", budget, 0.0, finite=False)
    return budget


def _refuse_missing(
    name: str, kind: str, wanted: set[str], found: Mapping[str, object]
) -> None:
    if missing := sorted(wanted - found.keys()):
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ValueError(
            f"the {name} must cover all {kind} of the graph; {missing[0]!r}{others} "
            "are missing"
        )


# Rewrite a step for given residencies, before its copies are scheduled.
#
# Recomputed nodes appear in the graph a second time, results are in place where
# possible, and every offloaded storage has the gaps over which it may be absent.


_REMEMBERED = 32
"""Graphs of the last residencies: more than a search has starts, which `least_memory`
goes through twice."""


class Rewriter:
    """Rewriter of one training graph for many residencies.

    The recomputed tensors determine the graph. The last few graphs are cached, because
    a search changes one residency at a time.
    """

    def __init__(self, graph: Graph, profile: Profile) -> None:
        self._rematerialize = Rematerializer(graph)
        self._profile = without_others(profile, graph)
        self._own_ms = sum(self._profile.node_ms.values())
        self._small = _small_bytes(graph)
        self._ranked: _Ranked = {}
        self.candidates: Sequence[Candidate] | None = None
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
        ready = self._rematerialized(residency).rewritten
        swaps = _swaps(ready, residency, hosted, self._small)
        away = (hosted or frozenset()) - ready.graph.immovable
        return replace(ready, swaps=swaps, away=away)

    def overlapped(
        self,
        request: "StepRequest",
        residency: Mapping[str, Residency],
        plans: Mapping[str, ConvPlan],
    ) -> Rewritten:
        """Return a step whose collectives overlap where the request's budget permits.

        What a collective uses is not offloaded before the wait for it.

        Args:
            request: The request that is scheduled.
            residency: Residencies for which the step is rewritten.
            plans: Plans of its convolutions.
        """
        hosted, budget = request.hosted, request.budget
        ready = self(residency, hosted)
        needed = ready.problem(plans, budget).needed()
        graph = overlap(ready.graph, ready.uses, needed, budget)
        if graph is ready.graph:
            return ready
        uses = uses_of(graph)
        changes = changes_of(uses.values(), len(graph.nodes))
        found = Rewritten(graph, ready.profile, uses, changes, {}, ready.away)
        fixed = under_way(graph)
        swaps = {
            name: left
            for name, gaps in _swaps(found, residency, hosted, self._small).items()
            if (left := [gap for gap in gaps if gap not in fixed.get(name, ())])
        }
        found = replace(found, swaps=swaps)
        return found if found.problem(plans, budget).need()[0] <= budget else ready

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
        first = ready.first_plans(convolutions, plans)
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
            (name, choice)
            for name, choice in residency.items()
            if choice in RECOMPUTED or name in self._unsaved
        )
        if again not in self._known:
            graph, changes = self._rematerialize.rewrite(dict(again))
            # Recomputation for every use is the same as once, if there is only one use.
            same = (k for k in self._known.values() if k.graph.nodes == graph.nodes)
            self._known[again] = next(same, None) or _Rematerialized(
                graph, self._profile, changes, self._touches, self._ranked
            )
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(again)
        return self._known[again]

    @cached_property
    def chains(self) -> RecomputeChains:
        """Recompute chains of the graph."""
        return recompute_chains(self._rematerialize.graph)

    @cached_property
    def _unsaved(self) -> frozenset[str]:
        """Forward results that no backward node reads."""
        return self._rematerialize.unsaved - self._rematerialize.saved

    @cached_property
    def _touches(self) -> Touches:
        return Touches(self._rematerialize.graph)


class _Rematerialized:
    """A rematerialized graph, with cached results derived from it."""

    def __init__(
        self,
        graph: Graph,
        profile: Profile,
        changes: Insertions | None,
        touches: Touches,
        ranked: _Ranked,
    ) -> None:
        self.graph = graph
        self._ranked = ranked
        self._profile = profile
        self._changes, self._touches = changes, touches

    @cached_property
    def copies_ms(self) -> float:
        """Time of the recomputed nodes, each at its fastest."""
        names = (node.name for node in self.graph.nodes if "~" in node.name)
        return sum(self._profile.recompute_ms_of(origin(name)) for name in names)

    @cached_property
    def rewritten(self) -> Rewritten:
        """The step with in-place results and no offload."""
        changes, touched = self._changes, None
        if changes is not None:
            touched = self._touches.with_nodes(
                self.graph, changes.copies, changes.rebound
            )
        known = self._touches.known
        final, uses = in_place_with_uses(self.graph, touched, known)
        return Rewritten(
            graph=final,
            profile=profile_of(final, self._profile),
            uses=uses,
            changes=changes_of(uses.values(), len(final.nodes)),
            swaps={},
            known=_Known(self._ranked),
        )


def _swaps(
    ready: Rewritten,
    residency: Mapping[str, Residency],
    hosted: frozenset[str] | None,
    small: float,
) -> Swaps:
    """Return the gaps over which residencies offload storages.

    Parameters and state of fewer than `small` bytes stay unless they are named.
    """
    graph, gaps = ready.graph, ready.known.gaps
    chosen = {
        graph.storages[name]: choice
        for name, choice in residency.items()
        if name not in (EVERYTHING, PERSISTENTS)
    }
    others = residency.get(EVERYTHING, Residency.KEEP)
    persistents = residency.get(PERSISTENTS, Residency.KEEP)
    found = {}
    for use in ready.moveable():
        storage = use[0]
        if not use[4]:  # `use.period`; attributes of named tuples are slow
            choice = chosen.get(storage, others)
        elif hosted is None:
            default = Residency.KEEP if use[1] < small else persistents
            choice = chosen.get(storage, default)
        else:
            choice = Residency.PAGE if storage in hosted else Residency.KEEP
        if choice not in gaps:
            continue
        known = gaps[choice]
        if storage not in known:
            known[storage] = _leaves_over(graph, use, choice)
        if over := known[storage]:
            found[storage] = over
    return found


def _small_bytes(graph: Graph) -> float:
    """Return the bytes below which parameters and state are not worth offloading."""
    everything = sum(spec.nbytes for spec in graph.with_role(*PERSISTENT))
    return min(SMALL, everything / 1024)


def _leaves_over(
    graph: Graph, use: Use, choice: Residency
) -> Sequence[tuple[int, int]]:
    """Return the gaps over which one storage is offloaded, ascending."""
    gaps = use.gaps()
    # With micro-batches, forward nodes may follow the backward nodes of another part.
    nodes, count = graph.nodes, len(graph.nodes)
    if choice is Residency.PAGE:
        within = use.persistent or gaps[-1][1] < count
        return gaps if within else [(i, j) for i, j in gaps if j < count]
    if use.persistent:
        return sorted(gaps, key=lambda gap: gap[1] - gap[0])[-1:]
    forward = Phase.FORWARD
    return [
        (i, j)
        for i, j in gaps
        if j < count and nodes[i].phase is forward is not nodes[j].phase
    ]


# Schedule a whole training step for given residencies.
#
# Residency -> rematerialized graph -> in-place -> convolution plans -> schedule. The
# bytes that are free while a convolution runs become its workspace, so that memory
# saved on tensors buys faster algorithms.


_LINK_SHARES = (0.8, 1.0)
"""Assumed shares of the link rate when intervals are shortened for workspaces. The
lower one leaves time for copies where faster convolutions hide less of them; the other
is tried where that helped."""

_AS_FAST = 1.02
"""Factor on the time of a convolution up to which another plan is about as fast."""

_SLOW = 1e-3
"""Part of the step by which convolutions may be slower before room is made for them."""

_AT_ONCE = 0.3
"""Part of the gains for which room is made at a time. With all at once, copies take
longer than is gained if many convolutions are slow."""

_COMPLETE_SCHEDULERS = ("timed", "on_demand")
"""Schedulers that succeed whenever the shortest residency intervals fit."""


@dataclass(frozen=True, slots=True)
class UnsimulatedPlan:
    """A step with copies and convolutions decided, but no program emitted yet.

    Attributes:
        request: The planning request.
        residency: Residencies of tensors.
        ready: The graph rewritten for them.
        plans: Plan of each convolution node.
        intervals: Residency intervals of storages.
        occupancy: Memory ledger, workspaces included.
        known_ms: The predicted time, if it is known.
    """

    request: StepRequest
    residency: Mapping[str, Residency]
    ready: Rewritten
    plans: Mapping[str, ConvPlan]
    intervals: Sequence[ResidencyInterval]
    occupancy: MemoryLedger
    known_ms: float | None = None

    def step_ms(self, below: float = math.inf) -> float:
        """Return the predicted time, or infinity if it is not below a limit."""
        if self.known_ms is not None:
            return self.known_ms if self.known_ms < below else math.inf
        ready = self.ready
        return step_ms(ready.graph, ready.profile, self.intervals, self.plans, below)

    def plan(self) -> StepPlan:
        """Emit and simulate the program of the step."""
        request, ready = self.request, self.ready
        workspaces = workspaces_of(ready.profile, self.plans)
        peak, _ = self.occupancy.peak()
        schedule = emit(ready.graph, self.intervals, workspaces, peak, ready.away)
        return StepPlan(
            schedule=schedule,
            intervals=tuple(self.intervals),
            plans=self.plans,
            residency=self.residency,
            prediction=simulate(schedule, timed_by(ready.profile, self.plans)),
            policy=name_of(request.policy),
            scheduler=name_of(request.timing),
            budget=request.budget,
        )


def schedule_residency(
    request: StepRequest, residency: Mapping[str, Residency], below: float = math.inf
) -> UnsimulatedPlan:
    """Decide copies and convolution plans of a step with given residencies.

    Args:
        request: The planning request.
        residency: Residencies of tensors; missing tensors are kept.
        below: Time in ms that the step has to be below to be of use. Schedules that
            could not become as fast are not improved.

    Raises:
        PlanningError: The step cannot fit; has the shortfall and the node.
    """
    ready = request.rewritten(residency)
    chosen = ready.first_plans(request.convolutions, request.plans)
    if ready.profile.network_ms:
        ready = request._rewriter.overlapped(request, residency, chosen)
    found = _scheduled(request, residency, ready, chosen)
    if request.convolutions != "dynamic":
        return found
    return _with_room_for_workspaces(found, chosen, below)


def _scheduled(
    request: StepRequest,
    residency: Mapping[str, Residency],
    ready: Rewritten,
    first: Mapping[str, ConvPlan],
) -> UnsimulatedPlan:
    """Schedule copies around these convolution plans; use what is free for others."""
    intervals, occupancy = intervals_of(
        request.timing, ready.problem(first, request.budget)
    )
    if request.convolutions != "dynamic":
        return UnsimulatedPlan(request, residency, ready, first, intervals, occupancy)
    least = occupancy.copy()
    grown = grow_workspace_plans(ready, first, occupancy)
    found = UnsimulatedPlan(request, residency, ready, grown, intervals, occupancy)
    return _with_later_copies(found, first, least)


def _with_room_for_workspaces(
    plan: UnsimulatedPlan, first: Mapping[str, ConvPlan], below: float
) -> UnsimulatedPlan:
    """Schedule again around larger workspaces as long as that makes the step faster.

    A scheduler keeps what fits, and so leaves some convolutions without workspace. The
    convolutions that lose most get the workspace before anything is scheduled, a few
    of them at a time: copies have to make room for it, and take time themselves.

    Args:
        plan: The scheduled step.
        first: Plans of the convolutions that it was scheduled with.
        below: Time in ms that the step has to be below to be of use.
    """
    ready, budget = plan.ready, plan.request.budget
    while budget < math.inf:
        gains = _gains(plan, first)
        total, enough = sum(gain for gain, _, _ in gains), 0.0
        step_ms = plan.step_ms()
        if total <= _SLOW * step_ms or step_ms - total >= below:
            break
        larger = dict(first)
        for gain, name, faster in gains:
            larger[name] = faster
            enough += gain
            if enough >= _AT_ONCE * total:
                break
        try:
            found = _scheduled(plan.request, plan.residency, ready, larger)
        except PlanningError:
            break
        if found.step_ms(step_ms) >= step_ms:
            break
        plan, first = found, larger
    return plan


def _gains(
    plan: UnsimulatedPlan, first: Mapping[str, ConvPlan]
) -> list[tuple[float, str, ConvPlan]]:
    """Return gains in ms of convolutions, the largest first, and their faster plans.

    Of the plans that fit beside everything that must be resident, it is the one with
    the least workspace that is about as fast as any.
    """
    ready, budget = plan.ready, plan.request.budget
    slow = [
        (position, name, ranked)
        for position, name, ranked in ready.convolutions()
        if plan.plans[name].time_ms > _AS_FAST * ranked[0].time_ms
    ]
    needed = ready.problem(first, budget).needed() if slow else []
    found = []
    for position, name, ranked in slow:
        free = budget - needed[position] + rounded(first[name].workspace)
        fitting = [choice for choice in ranked if rounded(choice.workspace) <= free]
        as_fast = (c for c in fitting if c.time_ms <= _AS_FAST * fitting[0].time_ms)
        best = min(as_fast, key=lambda c: c.workspace, default=plan.plans[name])
        gain = plan.plans[name].time_ms - best.time_ms
        if gain > 0.0:
            found.append((gain, name, best))
    return sorted(found, key=lambda item: -item[0])


def _with_later_copies(
    plan: UnsimulatedPlan, least: Mapping[str, ConvPlan], occupancy: MemoryLedger
) -> UnsimulatedPlan:
    """Shorten intervals to the time of their copies if faster convolutions fit then.

    A scheduler that fills the budget with prefetched storages leaves convolutions only
    small workspaces. The step without changes is returned if it is the fastest.

    Args:
        plan: The scheduled step.
        least: Plans of the convolutions with the least workspaces.
        occupancy: Ledger of the step with these workspaces.
    """
    ready = plan.ready
    slowed = any(
        plan.plans[name].time_ms > ranked[0].time_ms
        for _, name, ranked in ready.convolutions()
    )
    if not slowed or not any(i.copied_in or i.copied_out for i in plan.intervals):
        return plan
    times = timed_by(ready.profile, plan.plans).node_ms
    clock = Clock([times[node.name] for node in ready.graph.nodes])
    count = len(ready.graph.nodes)
    best, best_ms = plan, plan.step_ms()
    for share in _LINK_SHARES:
        trimmed = trim_to_copies(plan.intervals, clock, ready.profile, share)
        less = occupancy.copy()
        for old, new in zip(plan.intervals, trimmed, strict=True):
            if old is not new:
                less.add(old.start, new.start - 1, -old.nbytes)
                less.add(new.stop + 1, old.stop, -old.nbytes)
        # A persistent storage may be fetched only in the next step now.
        intervals = [shifted(i, -count) if i.start >= count else i for i in trimmed]
        plans = grow_workspace_plans(ready, least, less)
        found = replace(plan, plans=plans, intervals=intervals, occupancy=less)
        step_ms = found.step_ms(best_ms)
        if step_ms >= best_ms:
            break
        best, best_ms = found, step_ms
    return replace(best, known_ms=best_ms)


def plan_residency(
    request: StepRequest, residency: Mapping[str, Residency]
) -> StepPlan:
    """Schedule and simulate a step with given residencies; see `schedule_residency`."""
    return schedule_residency(request, residency).plan()


def check_residency(request: StepRequest, residency: Mapping[str, Residency]) -> None:
    """Raise a `PlanningError` if residencies do not fit; faster than scheduling."""
    if request.timing not in _COMPLETE_SCHEDULERS:
        plan_residency(request, residency)
        return
    check_fits(*request.need(residency), request.budget)


def grow_workspace_plans(
    ready: Rewritten, plans: Mapping[str, ConvPlan], occupancy: MemoryLedger
) -> dict[str, ConvPlan]:
    """Choose the fastest plan that fits at each convolution; update the ledger."""
    found = dict(plans)
    for position, name, ranked in ready.convolutions():
        before = rounded(plans[name].workspace)
        free = occupancy.budget - occupancy[position] + before
        if free < math.inf:
            free -= free % ALIGNMENT
        plan = next(p for p in ranked if p.workspace <= free)
        if plan is not plans[name]:
            occupancy.add(position, position, rounded(plan.workspace) - before)
            found[name] = plan
    return found
