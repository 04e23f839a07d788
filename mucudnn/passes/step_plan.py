"""A budget in, a schedule of a whole training step out.

Residency -> rematerialized graph -> in-place -> convolution plans -> schedule. The
bytes that are free while a convolution runs become its workspace, so that memory saved
on tensors buys faster algorithms.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import Graph, Phase
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import Schedule
from mucudnn.passes.inplace import in_place
from mucudnn.passes.occupancy import Occupancy, Use, rounded, uses_of
from mucudnn.passes.rematerialize import rematerialize
from mucudnn.passes.residency import EVERYTHING, RECOMPUTED, Residency
from mucudnn.passes.schedulers import SCHEDULERS
from mucudnn.passes.simulate import Prediction, simulate
from mucudnn.passes.stays import emit
from mucudnn.passes.window import Problem, Scheduler

__all__ = [
    "CONVOLUTIONS",
    "Prepared",
    "Preparer",
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
class Prepared:
    """A step whose residencies are decided, before its copies are timed.

    Attributes:
        graph: Rematerialized and in-place.
        profile: Of that graph.
        uses: Of its storages.
        swaps: Gaps over which storages may leave.
        resident: Bytes of what never leaves.
    """

    graph: Graph
    profile: Profile
    uses: Mapping[str, Use]
    swaps: Mapping[str, Sequence[tuple[int, int]]]
    resident: int

    def problem(self, plans: Mapping[str, ConvPlan], budget: float) -> Problem:
        """What a scheduler decides about, with convolutions planned."""
        return Problem(
            self.graph,
            self.uses,
            self.swaps,
            timed_by(self.profile, plans),
            workspaces_of(self.profile, plans),
            self.resident,
            budget,
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
    """

    def __init__(self, graph: Graph, profile: Profile) -> None:
        self._graph = graph
        self._profile = profile
        self._known: OrderedDict[frozenset[tuple[str, Residency]], Prepared] = (
            OrderedDict()
        )

    def __call__(self, residency: Mapping[str, Residency]) -> Prepared:
        """A rewritten step.

        Args:
            residency: Of saved tensors; what is left out is kept.
        """
        again = frozenset(
            (name, choice) for name, choice in residency.items() if choice in RECOMPUTED
        )
        if again not in self._known:
            self._known[again] = self._rewritten(dict(again))
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(again)
        ready = self._known[again]
        return replace(ready, swaps=_swaps(ready.graph, ready.uses, residency))

    def _rewritten(self, again: Mapping[str, Residency]) -> Prepared:
        final = in_place(rematerialize(self._graph, again))
        uses = uses_of(final)
        return Prepared(
            graph=final,
            profile=profile_of(final, self._profile),
            uses=uses,
            swaps={},
            resident=sum(use.nbytes for use in uses.values() if use.persistent),
        )


def prepare(
    graph: Graph, profile: Profile, residency: Mapping[str, Residency]
) -> Prepared:
    """Rewrite a training graph by residencies, once; see `Preparer`."""
    return Preparer(graph, profile)(residency)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A training step under a budget.

    Attributes:
        schedule: What to run.
        plans: Convolution node -> how to run it.
        residency: What was decided about saved tensors.
        prediction: What it will cost.
        policy: Who decided.
        scheduler: Who timed the copies.
        budget: Bytes that were given.
    """

    schedule: Schedule
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


def state_bytes(graph: Graph) -> int:
    """Bytes of what outlives a step."""
    return sum(use.nbytes for use in uses_of(graph).values() if use.persistent)


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
        residency: Of saved tensors; what is left out is kept.
        budget: Bytes for everything, parameters and state included.
        scheduler: Times the copies.
        convolutions: One of `CONVOLUTIONS`.
        plans: Convolution node -> plan, for `fixed`.
        policy: What to call the decision.
        preparer: Of this graph, if it is planned more than once.

    Raises:
        PlanningError: It cannot fit; says how many bytes short, and at which node.
    """
    ready = (preparer or Preparer(graph, profile))(residency)
    final, known = ready.graph, ready.profile
    chosen = first_plans(known, convolutions, plans)
    problem = ready.problem(chosen, budget)
    stays, occupancy = SCHEDULERS.resolve(scheduler)(problem)
    if convolutions == "dynamic":
        chosen = grown(final, known, chosen, occupancy)
    workspaces = workspaces_of(known, chosen)
    schedule = emit(final, stays, workspaces, occupancy.peak()[0])
    return StepPlan(
        schedule=schedule,
        plans=chosen,
        residency=residency,
        prediction=simulate(schedule, timed_by(known, chosen)),
        policy=policy,
        scheduler=scheduler if isinstance(scheduler, str) else repr(scheduler),
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
        plan = fastest_of([p for p in front if rounded(p.workspace) <= free])
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


def _swaps(
    graph: Graph, uses: Mapping[str, Use], residency: Mapping[str, Residency]
) -> dict[str, list[tuple[int, int]]]:
    """The gaps over which storages leave: of offloaded ones that before backward."""
    n = len(graph.nodes)
    turn = next(
        (i for i, node in enumerate(graph.nodes) if node.phase is not Phase.FORWARD), n
    )
    others = residency.get(EVERYTHING, Residency.KEEP)
    of_storage = {
        graph.storages[name]: choice
        for name, choice in residency.items()
        if name != EVERYTHING
    }
    swaps = {}
    for use in uses.values():
        choice = of_storage.get(use.storage, others)
        if use.persistent:
            continue
        if choice is Residency.OFFLOAD:
            gaps = [(i, j) for i, j in use.gaps() if i < turn <= j < n]
        elif choice is Residency.PAGE:
            gaps = [(i, j) for i, j in use.gaps() if j < n]
        else:
            continue
        if gaps:
            swaps[use.storage] = gaps
    return swaps
