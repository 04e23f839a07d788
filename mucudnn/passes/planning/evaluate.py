"""A budget in, a schedule of a whole training step out.

Residency -> rematerialized graph -> in-place -> convolution plans -> schedule. The
bytes that are free while a convolution runs become its workspace, so that memory saved
on tensors buys faster algorithms.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import PERSISTENT, Graph, Phase
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import Schedule
from mucudnn.notebook import drawn
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.rematerialize import rematerialize
from mucudnn.passes.liveness import ALIGNMENT, rounded
from mucudnn.passes.registry import name_of
from mucudnn.passes.residency import (
    EVERYTHING,
    PERSISTENTS,
    RECOMPUTED,
    SMALL,
    Residency,
    saved_tensors,
)
from mucudnn.passes.scheduling import stays_of
from mucudnn.passes.scheduling.intervals import Stay, emit
from mucudnn.passes.scheduling.occupancy import Occupancy, Use, uses_of
from mucudnn.passes.scheduling.problem import Problem, Scheduler
from mucudnn.passes.simulate import Prediction, simulate

__all__ = [
    "CONVOLUTIONS",
    "Preparer",
    "Rewritten",
    "StepPlan",
    "fastest_of",
    "first_plans",
    "grown",
    "origin",
    "plan_residency",
    "prepare",
    "profile_of",
    "state_bytes",
    "timed_by",
    "workspaces_of",
]

CONVOLUTIONS = ("dynamic", "fastest", "least", "fixed")
"""How convolutions get their workspace: what is free, all they want, nothing, or as
planned before."""

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
        plans = first_plans(self.profile, "least", None)
        return self.problem(plans, math.inf).least()[1].peak()[0]


class Preparer:
    """Rewrites one training graph by residencies, time and again.

    What is computed again decides what the graph looks like; the last few of them are
    remembered, because a search changes one residency at a time.

    Args:
        graph: A training graph that nothing has made in-place yet.
        profile: Of it.
        hosted: Parameters and state whose home is the host: they leave, and no others
            do, whatever residencies say. If not given, residencies decide.
    """

    def __init__(
        self, graph: Graph, profile: Profile, hosted: frozenset[str] | None = None
    ) -> None:
        self._graph = graph
        self._profile = profile
        self._hosted = hosted
        self._last: tuple[dict[str, Residency], Rewritten] | None = None
        self._known: OrderedDict[frozenset[tuple[str, Residency]], Rewritten] = (
            OrderedDict()
        )
        self._saved = {saved.name for saved in saved_tensors(graph)}

    def __call__(self, residency: Mapping[str, Residency]) -> Rewritten:
        """A rewritten step.

        Args:
            residency: Of saved tensors; what is left out is kept.
        """
        if self._last is not None and self._last[0] == residency:
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
        hosted = self._hosted
        choices = _Choices(ready.graph, residency, hosted)
        swaps = {u.storage: g for u in ready.idle if (g := choices.gaps(u))}
        found = replace(ready, swaps=swaps, away=hosted or frozenset())
        self._last = dict(residency), found
        return found

    def _rewritten(self, again: Mapping[str, Residency]) -> Rewritten:
        final = in_place(rematerialize(self._graph, again, self._saved))
        uses = uses_of(final)
        return Rewritten(
            graph=final,
            profile=profile_of(final, self._profile),
            uses=uses,
            idle=[use for use in uses.values() if any(use.gaps())],
            swaps={},
        )


def prepare(
    graph: Graph, profile: Profile, residency: Mapping[str, Residency]
) -> Rewritten:
    """Rewrite a training graph by residencies, once; see `Preparer`."""
    return Preparer(graph, profile)(residency)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A training step under a budget.

    Attributes:
        schedule: What to run.
        stays: What the schedule was made of.
        plans: Convolution node -> how to run it.
        residency: What was decided about tensors.
        prediction: What it will cost.
        policy: Who decided.
        scheduler: Who timed the copies.
        budget: Bytes that were given.
    """

    schedule: Schedule
    stays: Sequence[Stay]
    plans: Mapping[str, ConvPlan]
    residency: Mapping[str, Residency]
    prediction: Prediction
    policy: str
    scheduler: str
    budget: float

    @property
    def peak_bytes(self) -> int:
        """The most device memory in use at once, parameters and state included."""
        return self.schedule.peak_bytes

    def _repr_html_(self) -> str:
        """For notebooks."""
        return drawn("step_plan", self)

    @property
    def recomputed(self) -> int:
        """How many nodes run a second time or more often."""
        return sum("~" in node.name for node in self.schedule.graph.nodes)


def origin(node: str) -> str:
    """The node that a rematerialized one is a copy of; itself if it is none."""
    return node.partition("~")[0]


def profile_of(graph: Graph, profile: Profile) -> Profile:
    """A profile with entries for the copies in a rematerialized graph."""
    names = [node.name for node in graph.nodes]
    return Profile(
        node_ms={name: profile.node_ms[origin(name)] for name in names},
        workspaces={
            name: profile.workspaces[origin(name)]
            for name in names
            if origin(name) in profile.workspaces
        },
        fronts={
            name: profile.fronts[origin(name)]
            for name in names
            if origin(name) in profile.fronts
        },
        out_bytes_per_ms=profile.out_bytes_per_ms,
        in_bytes_per_ms=profile.in_bytes_per_ms,
    )


def state_bytes(graph: Graph, names: Iterable[str] | None = None) -> int:
    """Bytes of what outlives a step: of some of it, or of all."""
    chosen = None if names is None else set(names)
    return sum(
        use.nbytes
        for use in uses_of(graph).values()
        if use.persistent and (chosen is None or use.storage in chosen)
    )


def plan_residency(
    graph: Graph,
    profile: Profile,
    residency: Mapping[str, Residency],
    *,
    budget: float,
    scheduler: str | Scheduler = "timed",
    convolutions: str = "dynamic",
    plans: Mapping[str, ConvPlan] | None = None,
    policy: str = "given",
    preparer: Preparer | None = None,
) -> StepPlan:
    """Schedule a step whose residencies are decided.

    Args:
        graph: A training graph that nothing has made in-place yet.
        profile: Of it.
        residency: Of tensors; what is left out is kept.
        budget: Bytes for everything, parameters and state included.
        scheduler: Times the copies; a name or a function.
        convolutions: One of `CONVOLUTIONS`.
        plans: Convolution node -> plan, for `fixed`.
        policy: What to call the decision.
        preparer: Of this graph, if it is planned more than once, or if it is decided
            what of its parameters and state is at home on the host.

    Raises:
        PlanningError: It cannot fit; says how many bytes short, and at which node.
    """
    ready = (preparer or Preparer(graph, profile))(residency)
    final, known = ready.graph, ready.profile
    chosen = first_plans(known, convolutions, plans)
    problem = ready.problem(chosen, budget)
    stays, occupancy = stays_of(scheduler, problem)
    if convolutions == "dynamic":
        chosen = grown(final, known, chosen, occupancy)
    workspaces = workspaces_of(known, chosen)
    schedule = emit(final, stays, workspaces, occupancy.peak()[0], ready.away)
    return StepPlan(
        schedule=schedule,
        stays=tuple(stays),
        plans=chosen,
        residency=residency,
        prediction=simulate(schedule, timed_by(known, chosen)),
        policy=policy,
        scheduler=name_of(scheduler),
        budget=budget,
    )


def first_plans(
    profile: Profile, convolutions: str, plans: Mapping[str, ConvPlan] | None
) -> dict[str, ConvPlan]:
    """Plans to schedule with; `dynamic` ones begin small and grow."""
    match convolutions:
        case "fixed":
            if plans is None:
                raise ValueError("fixed convolutions need their plans")
            return {name: plans[origin(name)] for name in profile.fronts}
        case "fastest":
            return {name: fastest_of(front) for name, front in profile.fronts.items()}
        case "dynamic" | "least":
            return {name: front[0] for name, front in profile.fronts.items()}
    valid = ", ".join(CONVOLUTIONS)
    raise ValueError(f"unknown choice {convolutions!r} of plans; choose of: {valid}")


def fastest_of(front: Sequence[ConvPlan]) -> ConvPlan:
    """The plan that takes least time, of those the one with least workspace."""
    return min(front, key=lambda plan: (plan.time_ms, plan.workspace))


def grown(
    graph: Graph,
    profile: Profile,
    plans: Mapping[str, ConvPlan],
    occupancy: Occupancy,
) -> dict[str, ConvPlan]:
    """The fastest plan in what is free at each convolution; the ledger follows."""
    found = dict(plans)
    for position, node in enumerate(graph.nodes):
        front = profile.fronts.get(node.name)
        if front is None:
            continue
        before = rounded(plans[node.name].workspace)
        free = occupancy.budget - occupancy[position] + before
        if free < math.inf:
            free -= free % ALIGNMENT
        plan = fastest_of([p for p in front if p.workspace <= free])
        occupancy.add(position, position, rounded(plan.workspace) - before)
        found[node.name] = plan
    return found


def workspaces_of(profile: Profile, plans: Mapping[str, ConvPlan]) -> dict[str, int]:
    """Node -> bytes of scratch memory, those of convolutions by their plans."""
    sizes = {name: rounded(nbytes) for name, nbytes in profile.workspaces.items()}
    sizes.update((name, rounded(plan.workspace)) for name, plan in plans.items())
    return {name: nbytes for name, nbytes in sizes.items() if nbytes}


def timed_by(profile: Profile, plans: Mapping[str, ConvPlan]) -> Profile:
    """A profile whose convolutions take what their plans take."""
    times = dict(profile.node_ms)
    times.update((name, plan.time_ms) for name, plan in plans.items())
    return replace(profile, node_ms=times)


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
        self._turn = next((i for i, p in phases if p is not Phase.FORWARD), self._count)
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
        """Of one storage, ascending."""
        choice = self._choice(use)
        if choice not in (Residency.OFFLOAD, Residency.PAGE):
            return []
        gaps, page = list(use.gaps()), choice is Residency.PAGE
        if use.persistent:
            return gaps if page else sorted(gaps, key=_length)[-1:]
        inside = [(i, j) for i, j in gaps if j < self._count]
        turn = self._turn
        return inside if page else [(i, j) for i, j in inside if i < turn <= j]

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
