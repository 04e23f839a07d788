"""From a trainer's graphs to placed steps, with and without a budget.

A step is planned several times: after each time, the chosen convolution plans are
measured. If the new times make the step hardly slower, the residencies are kept, as
well as what was decided when the step was split, since another search would take most
of the time. If the step cannot be measured or does not fit, the error names the bytes
that suffice for everything.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from mucudnn.errors import OutOfMemoryError, PlanningError
from mucudnn.ir.conv import ConvPlan, ConvProblem
from mucudnn.ir.graph import PERSISTENT, Graph, Phase
from mucudnn.ir.profile import MemoryTier, Profile, TierPlacement
from mucudnn.ir.schedule import STATIC, VIRTUAL
from mucudnn.ir.sizes import exact_bytes
from mucudnn.ir.tensor import Role
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.updates import updates_last
from mucudnn.passes.liveness import rounded
from mucudnn.passes.ordering import Order, ordered
from mucudnn.passes.placement.layout import PlacedStep
from mucudnn.passes.placement.tiers import place_state
from mucudnn.passes.planning.bound import lower_bound
from mucudnn.passes.planning.place_step import place_step, place_tiered_step
from mucudnn.passes.planning.request import StepRequest, plan_residency
from mucudnn.passes.residency import PLANNED
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.runtime.profiling.links import mapping_costs, measured_tiers
from mucudnn.runtime.profiling.profiler import OnNode, profile, refine
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.sizes import measuring_bytes, size_profile
from mucudnn.runtime.tuning.bound_plan import restore_plans
from mucudnn.runtime.tuning.tuner import Tuner

_ROUNDS = 4
"""Maximum number of planning rounds, each with the previous plans measured."""

_HARDLY_SLOWER = 1.1
"""Slowdown by refined times up to which residencies are kept."""


@dataclass(frozen=True, slots=True)
class _BoundedStep:
    """A graph to place within a budget.

    Attributes:
        graph: Graph in the order of execution.
        budget: Budget of the graph and of `beside`.
        beside: Bytes of persistent state on the device that the graph does not use.
        hosted: Host-resident state, where another graph has decided that.
        tiers: Offload targets; none means unlimited host memory.
        state: Tier placement of host-resident state, where another graph has decided
            that.
    """

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
        """Measure, plan and place the step."""
        chunks = None
        if self.placement != STATIC:
            chunks = mapping_costs(self.tuner.backend, self._nbytes)
        # A profile that the budget brings along counts if it is of this graph.
        costs, known = self.budget.measured, self.budget.plan
        if costs is None or costs.node_ms.keys() != {n.name for n in self.graph.nodes}:
            costs, known = self._measured(progress), None
        if chunks is not None:
            costs = replace(costs, mapping_costs=chunks)
        request = self._request(costs)
        try:
            placed = self._place(request, known)
            # Place the step again with the chosen plans measured.
            times: dict[ConvPlan, float] = {}
            for _ in range(0 if self.plans is not None else _ROUNDS - 1):
                chosen = placed.plans.values()
                if all(plan in times for plan in chosen):
                    break
                better = refine(
                    self.tuner, request.profile, chosen, times, memory=self._nbytes
                )
                request = replace(request, profile=better)
                most_ms = _HARDLY_SLOWER * placed.plan.prediction.step_ms
                try:
                    placed = self._place(request, placed.plan, most_ms)
                except PlanningError:  # keep the last plan that fits
                    break
            return self._with_input_buffers(request, placed)
        except PlanningError as e:
            advised = self._advised(e)
            if advised is e:
                raise
            raise advised from e

    @property
    def _nbytes(self) -> int:
        """Bytes for the step; with a shared mapped arena, in whole chunks."""
        nbytes = self.budget.nbytes - self.beside
        mapper = self.tuner.backend.mapper
        if self.hosted is None or self.placement == STATIC or mapper is None:
            return nbytes
        specs = self.graph.with_role(*PERSISTENT)
        # Graphs share the mapped chunks, so only a whole number of them is of use.
        stays = sum(rounded(s.nbytes) for s in specs if s.name not in self.hosted)
        return nbytes - max(0, nbytes - stays) % mapper.chunk_bytes

    def _request(self, profile: Profile) -> StepRequest:
        """Return the planning request; without a backward pass, of paging."""
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
            placement=STATIC if profile.mapping_costs is None else self.placement,
        )

    def _measured(self, progress: OnNode | None) -> Profile:
        """Measure the graph; an error names the bytes that suffice for all of it."""
        final = in_place(self.graph)
        try:
            return profile(self.tuner, final, memory=self._nbytes, progress=progress)
        except (OutOfMemoryError, PlanningError) as e:
            least = max(
                measuring_bytes(self.tuner.backend, final), self._least_by_sizes()
            )
            words = exact_bytes(least + self.beside)
            raise type(e)(f"{e}; for the whole step {words} is enough") from e

    def _with_input_buffers(
        self, request: StepRequest, placed: PlacedStep
    ) -> PlacedStep:
        """Shrink the step to make room for input buffers, if that is faster."""
        arriving = sum(spec.nbytes for spec in self.graph.with_role(Role.INPUT))
        left = request.budget - arriving
        asked = self.tuner.backend.step_io is not None and self.hosted is None
        if not asked or self.tiers or not 0 < left < placed.nbytes:
            return placed
        less = request.within(left)
        with suppress(PlanningError):
            other = place_step(less, _with_known_residency(less, placed.plan))
            # Without buffers, a step begins by fetching its inputs; with them, inputs
            # and fetched tensors share a link.
            rate, found = request.profile.in_bytes_per_ms, other.plan.prediction
            ms = max(found.step_ms, (found.in_bytes + arriving) / rate)
            if ms <= placed.plan.prediction.step_ms + arriving / rate:
                return other
        return placed

    def _place(
        self,
        request: StepRequest,
        known: StepPlan | None = None,
        most_ms: float | None = None,
    ) -> PlacedStep:
        """Place a step with a known plan's residencies, or with new ones.

        The known ones are kept up to `most_ms`; beyond, the search starts from them.
        """
        if self.tiers:
            return place_tiered_step(request, self.tiers, self.state)
        if known is not None and request.policy == PLANNED:
            with suppress(PlanningError):
                plan = _with_known_residency(request, known)
                if most_ms is None or plan.prediction.step_ms <= most_ms:
                    return place_step(request, plan)
            if most_ms is not None:
                request = replace(request, seed=known.residency)
        return place_step(request)

    def _advised(self, error: PlanningError) -> PlanningError:
        """Return the error with bytes that suffice to measure, and for other state."""
        least = measuring_bytes(self.tuner.backend, in_place(self.graph))
        if self.budget.convolutions == "fastest":  # more memory may change the fastest
            least = max(least, self._least_by_sizes())
        known = error.least_bytes
        if known is None or (known >= least and not self.beside):
            return error
        least = max(least, known) + self.beside
        short = least - self.budget.nbytes
        return PlanningError(
            f"{exact_bytes(short)} short: the budget is "
            f"{exact_bytes(self.budget.nbytes)}, node {error.node!r} needs most; "
            f"{exact_bytes(least)} is enough, including the memory of measuring and "
            "of other nodes",
            node=error.node,
            short_by=short,
            least_bytes=least,
        )

    def _least_by_sizes(self) -> int:
        """Return an upper bound of the required bytes, by sizes alone."""
        # A budget of 0 is always refused, and the refusal names the least one.
        sizes = size_profile(self.tuner, in_place(self.graph))
        try:
            place_step(self._request(sizes).within(0))
        except PlanningError as e:
            return e.least_bytes or 0
        return 0


def _with_known_residency(request: StepRequest, known: StepPlan) -> StepPlan:
    scheduler = request.scheduler or known.scheduler
    plan = plan_residency(request.scheduled(scheduler), known.residency)
    return replace(plan, least_ms=lower_bound(request).step_ms)


Plans = Mapping[ConvProblem, ConvPlan]
"""Problem -> its plan."""


# With a budget, graphs are measured. Without one, everything stays on the device and
# only sizes matter: the same path with a profile of sizes and unlimited memory.
#
# Graphs that share parameters and state must agree about what is host-resident, so the
# first one that is planned decides.


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
    """Plan and place graphs that share parameters and state, and run in turn.

    Args:
        tuner: Measures and plans convolutions; its memory limit applies as well.
        graphs: Graphs before the in-place pass.
        budget: Budget of all graphs; without one nothing is offloaded.
        first: Index of the graph that decides which state is host-resident.
        order: Order of nodes: a name in `ORDERS`, or a function.
        plans: Existing convolution plans; missing ones are made.
        progress: Called while nodes are measured.
        placement: One of `PLACEMENTS`.
    """
    if budget is None:
        known = plan_convolutions(tuner, tuple(graphs), plans)
        return _with_kernels(
            tuner,
            [resident_step(tuner, graph, order, known, placement) for graph in graphs],
        )
    # Persistent state is allocated once for all graphs.
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
            fixed = plans_by_node(final, plan_convolutions(tuner, (final,), plans))
        mine = budget
        # Measured times and a given plan belong to the first graph.
        if graph is not graphs[first]:
            mine = replace(budget, measured=None, plan=None)
        return _BoundedStep(
            *(tuner, final, mine, beside, hosted, fixed, placement),
            tiers=tiers,
            state=state,
        ).placed(progress)

    # The first graph decides what is host-resident, and whether tensors are mapped in
    # chunks; the others follow, as they share the state and the chunks.
    decided = within(graphs[first], None, placement)
    hosted = frozenset(decided.schedule.hosted)
    placement = STATIC if decided.layout.pages is None else VIRTUAL
    offloaded, state = decided.plan.prediction.placement, None
    if offloaded is not None:
        state = place_state(decided.schedule, offloaded.tiers)
    return _with_kernels(
        tuner,
        [
            decided if i == first else within(graph, hosted, placement, state)
            for i, graph in enumerate(graphs)
        ],
    )


def _with_kernels(tuner: Tuner, steps: list[PlacedStep]) -> list[PlacedStep]:
    """Return placed steps with their execution plans loaded, before a step runs."""
    for plan in dict.fromkeys(p for placed in steps for p in placed.plans.values()):
        restore_plans(tuner.backend, tuner.cache, plan)
    return steps


def resident_step(
    tuner: Tuner, graph: Graph, order: str | Order, plans: Plans, placement: str
) -> PlacedStep:
    """Place a graph whose tensors all stay on the device.

    Where updates can be batched they come last, unless that takes more memory.
    """

    def placed(graph: Graph) -> PlacedStep:
        final = in_place(graph)
        sizes = size_profile(tuner, final, plans)
        if placement == VIRTUAL:
            sizes = replace(sizes, mapping_costs=mapping_costs(tuner.backend))
        chosen = plans_by_node(final, plans)
        scratch = {n: plan.workspace for n, plan in chosen.items() if plan.workspace}
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

    # One launch updates all parameters, but keeps all gradients alive until then.
    found, last = placed(graph), updates_last(graph)
    ops = {node.op for node in graph.nodes if node.phase is Phase.UPDATE}
    kernels = (tuner.backend.kernels.get(op) for op in ops)
    batched = any(kernel is not None and kernel.run_batched for kernel in kernels)
    if last.nodes == graph.nodes or not batched:
        return found
    other = placed(last)
    return other if other.nbytes <= found.nbytes else found


def plan_convolutions(
    tuner: Tuner, graphs: tuple[Graph, ...], plans: Plans | None = None
) -> Plans:
    """Plan every distinct convolution of some graphs."""
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
    # Plan all of them together, as they may share a total workspace.
    missing = [problem for problem in problems if problem not in known]
    made = dict(zip(missing, tuner.plan(missing), strict=True)) if missing else {}
    return MappingProxyType(known | made)


def fixed_plans(
    tuner: Tuner,
    graphs: tuple[Graph, ...],
    budget: MemoryBudget | None,
    plans: Plans | None = None,
) -> Plans:
    """Return the plans that are fixed before graphs are placed.

    Unless the budget has `convolutions="fixed"`, only the plans that are given are
    fixed.
    """
    if budget is None or budget.convolutions == "fixed":
        return plan_convolutions(tuner, graphs, plans)
    return plans or {}


def plans_by_node(graph: Graph, plans: Plans) -> dict[str, ConvPlan]:
    """Return the plan of each convolution node."""
    return {n.name: plans[n.attrs["problem"]] for n in graph.nodes if n.op == "conv"}
