"""From graphs to what an executor runs: costs, a request, a step with places.

With a budget, what a graph costs is measured. Without one everything stays on the
device, and sizes are all that needs to be known: the same road, with a sketch for a
profile and no end to the memory.

Graphs that share parameters and state must agree about which of them never leave: the
first to be planned decides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mucudnn.backends.base import Backend
from mucudnn.errors import OutOfMemoryError, PlanningError
from mucudnn.ir.conv import ConvPlan, ConvProblem
from mucudnn.ir.graph import PERSISTENT, Graph, Phase
from mucudnn.ir.placement import STATIC, VIRTUAL
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import exact_bytes
from mucudnn.ir.tiers import MemoryTier, TierPlacement
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.optimizer_updates import updates_last
from mucudnn.passes.liveness import rounded
from mucudnn.passes.ordering import Order, ordered
from mucudnn.passes.placement.tiers import place_state
from mucudnn.passes.planning.place_step import PlacedStep, place_step
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.tiered_step import place_tiered_step
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.mapping_costs import mapping_costs
from mucudnn.runtime.training.profiler import OnNode, profile, refine
from mucudnn.runtime.training.sizes import measuring_bytes, sketch
from mucudnn.runtime.training.tier_rates import measured_tiers
from mucudnn.runtime.tuning.bound_plan import restore_plans
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["Plans", "place_steps", "plan_convolutions"]

Plans = Mapping[ConvProblem, ConvPlan]
"""How each convolution is run."""

_ROUNDS = 4
"""How often a step is planned, each time with the plans it chose before measured."""


def place_steps(
    tuner: Tuner,
    graphs: Sequence[Graph],
    budget: MemoryBudget | None = None,
    *,
    first: int = 0,
    order: str | Order = "builder",
    plans: Plans | None = None,
    progress: OnNode | None = None,
    placement: str = STATIC,
) -> list[PlacedStep]:
    """Plan and place graphs that share parameters and state, and take turns.

    Args:
        tuner: Measures and plans convolutions; its memory limit holds as well.
        graphs: What is run; nothing has made them in-place yet.
        budget: Of them all; without one nothing leaves the device.
        first: Which of them decides what of the state is host-resident.
        order: In which order nodes run; a name in `ORDERS`, or a function.
        plans: Convolution plans made before; what is missing is planned.
        progress: Called while nodes are measured.
        placement: Of `PLACEMENTS`.

    Raises:
        UnsupportedError: The placement is virtual, and the backend cannot map memory.
        PlanningError: One cannot fit, and says how many bytes short and what will do;
            or a convolution has no plan within the tuner's limit.
        OutOfMemoryError: One cannot be measured; says what will do for all of it.
    """
    if budget is None:
        known = plan_convolutions(tuner, tuple(graphs), plans)
        found = [_kept(tuner, graph, order, known, placement) for graph in graphs]
    else:
        found = _together(
            tuner, graphs, budget, first, order, plans, progress, placement
        )
    for plan in dict.fromkeys(p for placed in found for p in placed.plans.values()):
        restore_plans(tuner.backend, tuner.cache, plan)
    return found


def _kept(
    tuner: Tuner, graph: Graph, order: str | Order, plans: Plans, placement: str
) -> PlacedStep:
    """A graph whose tensors all stay on the device.

    Where updates can be one launch they come last, unless that takes more memory.
    """
    placed = _resident(tuner, graph, order, plans, placement)
    last = updates_last(graph)
    if last.nodes == graph.nodes or not _joins_updates(tuner.backend, graph):
        return placed
    other = _resident(tuner, last, order, plans, placement)
    return other if other.nbytes <= placed.nbytes else placed


def _joins_updates(backend: Backend, graph: Graph) -> bool:
    """Whether a backend launches several updates at once."""
    ops = {node.op for node in graph.nodes if node.phase is Phase.UPDATE}
    kernels = (backend.kernels.get(op) for op in ops)
    return any(kernel is not None and kernel.together for kernel in kernels)


def _resident(
    tuner: Tuner, graph: Graph, order: str | Order, plans: Plans, placement: str
) -> PlacedStep:
    """A graph placed with all its tensors; so it may be in-place already."""
    final = in_place(graph)
    sizes = sketch(tuner, final, plans)
    if placement == VIRTUAL:
        sizes = replace(sizes, chunks=mapping_costs(tuner.backend))
    chosen = _by_node(final, plans)
    scratch = {name: plan.workspace for name, plan in chosen.items() if plan.workspace}
    return place_step(
        StepRequest(
            ordered(order, final, {**sizes.workspaces, **scratch}),
            sizes,
            policy="keep_all",
            convolutions="fixed",
            plans=chosen,
            placement=placement,
        )
    )


def _by_node(graph: Graph, plans: Plans) -> dict[str, ConvPlan]:
    return {n.name: plans[n.attrs["problem"]] for n in graph.nodes if n.op == "conv"}


def _together(
    tuner: Tuner,
    graphs: Sequence[Graph],
    budget: MemoryBudget,
    first: int,
    order: str | Order,
    plans: Plans | None,
    progress: OnNode | None,
    placement: str,
) -> list[PlacedStep]:
    """Graphs within a budget, the first to decide before all others.

    Where it is mapped, the others share its chunks; where it is not, none are.
    """
    sizes = {
        s.name: rounded(s.nbytes) for g in graphs for s in g.with_role(*PERSISTENT)
    }

    tiers = measured_tiers(tuner.backend.device, budget.tiers, budget.nbytes)

    def within(
        graph: Graph,
        hosted: frozenset[str] | None,
        placement: str,
        state: TierPlacement | None = None,
    ) -> PlacedStep:
        held = {spec.name for spec in graph.with_role(*PERSISTENT)} | (hosted or set())
        beside = sum(n for name, n in sizes.items() if name not in held)
        final = ordered(order, graph, {})
        fixed = None
        if budget.convolutions == "fixed":
            fixed = _by_node(final, plan_convolutions(tuner, (final,), plans))
        mine = budget if graph is graphs[first] else replace(budget, measured=None)
        return _Bounded(
            *(tuner, final, mine, beside, hosted, fixed, placement),
            tiers=tiers,
            state=state,
        ).placed(progress)

    decided = within(graphs[first], None, placement)
    hosted = frozenset(decided.schedule.hosted)
    placement = STATIC if decided.layout.pages is None else VIRTUAL
    away, state = decided.plan.prediction.placement, None
    if away is not None:
        state = place_state(decided.schedule, away.tiers)
    return [
        decided if i == first else within(graph, hosted, placement, state)
        for i, graph in enumerate(graphs)
    ]


@dataclass(frozen=True, slots=True)
class _Bounded:
    """A graph to be placed within a budget."""

    tuner: Tuner
    graph: Graph
    budget: MemoryBudget
    beside: int
    hosted: frozenset[str] | None
    plans: dict[str, ConvPlan] | None
    placement: str
    tiers: Sequence[MemoryTier]
    state: TierPlacement | None

    def placed(self, progress: OnNode | None) -> PlacedStep:
        """Measure, plan and place."""
        request = self._request(self._measured(progress))
        try:
            return self._refined(request)
        except PlanningError as e:
            advised = self._advised(e)
            if advised is e:
                raise
            raise advised from e

    @property
    def _nbytes(self) -> int:
        """Its bytes: whole chunks where an arena is shared that is mapped."""
        nbytes = self.budget.nbytes - self.beside
        mapper = self.tuner.backend.mapper
        if self.hosted is None or self.placement == STATIC or mapper is None:
            return nbytes
        specs = self.graph.with_role(*PERSISTENT)
        stays = sum(rounded(s.nbytes) for s in specs if s.name not in self.hosted)
        return nbytes - max(0, nbytes - stays) % mapper.chunk_bytes

    def _request(self, profile: Profile) -> StepRequest:
        """What is asked of a step; where there is no backward pass, it is paged."""
        budget = self.budget
        trains = any(node.phase is Phase.BACKWARD for node in self.graph.nodes)
        return StepRequest(
            self.graph,
            profile,
            budget=max(0, self._nbytes),
            policy=budget.policy if trains else "paging",
            scheduler=budget.scheduler if trains else None,
            convolutions=budget.convolutions,
            plans=self.plans,
            hosted=self.hosted,
            placement=STATIC if profile.chunks is None else self.placement,
        )

    def _measured(self, progress: OnNode | None) -> Profile:
        """What the graph costs, and mapping the memory of it where that is asked.

        Raises:
            PlanningError: A convolution has no algorithm within the limits.
            OutOfMemoryError: There is no room to measure.
            UnsupportedError: Memory is to be mapped and cannot be.
        """
        if self.placement == STATIC:
            return self._costs(progress)
        chunks = mapping_costs(self.tuner.backend, self._nbytes)
        return replace(self._costs(progress), chunks=chunks)

    def _costs(self, progress: OnNode | None) -> Profile:
        """The profile that is given, if it is of this graph, or a new one.

        Raises:
            PlanningError: A convolution has no algorithm within the limits.
            OutOfMemoryError: There is no room to measure.
        """
        given = self.budget.measured
        names = {node.name for node in self.graph.nodes}
        if given is not None and names <= given.node_ms.keys():
            return given
        final = in_place(self.graph)
        try:
            return profile(self.tuner, final, memory=self._nbytes, progress=progress)
        except (OutOfMemoryError, PlanningError) as e:
            least = max(self._measuring_bytes(), self._least_by_sizes()) + self.beside
            raise type(e)(f"{e}; for all of the step {_will_do(least)}") from e

    def _refined(self, request: StepRequest) -> PlacedStep:
        """A placed step, planned again with the plans it chose measured in between.

        Raises:
            PlanningError: It cannot fit.
        """
        placed = self._place(request)
        times: dict[ConvPlan, float] = {}
        for _ in range(0 if self.plans is not None else _ROUNDS - 1):
            chosen = placed.plans.values()
            if all(plan in times for plan in chosen):
                break
            better = refine(
                self.tuner, request.profile, chosen, times, memory=self._nbytes
            )
            request = replace(request, profile=better)
            try:
                placed = self._place(request)
            except PlanningError:  # other times, other residencies: what fits is kept
                break
        return placed

    def _place(self, request: StepRequest) -> PlacedStep:
        """A step in the memory that there is, on the device and off it."""
        if not self.tiers:
            return place_step(request)
        return place_tiered_step(request, self.tiers, self.state)

    def _advised(self, error: PlanningError) -> PlanningError:
        """The error with what will do for measuring, and for others, as well."""
        least = self._measuring_bytes()
        if self.budget.convolutions == "fastest":  # in more memory others may be
            least = max(least, self._least_by_sizes())
        known = error.least_bytes
        if known is None or (known >= least and not self.beside):
            return error
        least = max(least, known) + self.beside
        short = least - self.budget.nbytes
        return PlanningError(
            f"{exact_bytes(short)} short: the budget is "
            f"{exact_bytes(self.budget.nbytes)}, node {error.node!r} needs most; with "
            f"what measuring takes, and others meanwhile, {_will_do(least)}",
            node=error.node,
            short_by=short,
            least_bytes=least,
        )

    def _measuring_bytes(self) -> int:
        return measuring_bytes(self.tuner.backend, in_place(self.graph))

    def _least_by_sizes(self) -> int:
        """Bytes that will do whatever is measured, as far as sizes say."""
        sizes = sketch(self.tuner, in_place(self.graph))
        try:
            place_step(self._request(sizes).within(0))
        except PlanningError as e:
            return e.least_bytes or 0
        return 0


def _will_do(nbytes: int) -> str:
    return f"{exact_bytes(nbytes)} will do"


def plan_convolutions(
    tuner: Tuner, graphs: tuple[Graph, ...], plans: Plans | None = None
) -> Plans:
    """One plan for every distinct convolution of some graphs.

    Graphs are planned together, as a limit on all workspaces together demands. Plans
    made before are kept where they are within the tuner's limit.
    """
    problems = dict.fromkeys(
        node.attrs["problem"]
        for graph in graphs
        for node in graph.nodes
        if node.op == "conv"
    )
    limit = tuner.workspace_limit
    if tuner.total_workspace is not None:
        limit = tuner.total_workspace
    known = {
        problem: plan
        for problem, plan in (plans or {}).items()
        if problem in problems and plan.workspace <= limit
    }
    missing = [problem for problem in problems if problem not in known]
    made = dict(zip(missing, tuner.plan(missing), strict=True)) if missing else {}
    return MappingProxyType(known | made)
