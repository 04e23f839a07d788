"""From graphs to placed steps: costs, planning request, arena offsets.

With a budget, graphs are measured. Without one, everything stays on the device and only
sizes matter: the same path with a profile of sizes and unlimited memory.

Graphs that share parameters and state must agree about what is host-resident, so the
first one that is planned decides.
"""

from collections.abc import Sequence
from dataclasses import replace

from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.ir.placement import STATIC, VIRTUAL
from mucudnn.ir.tiers import TierPlacement
from mucudnn.passes.liveness import rounded
from mucudnn.passes.ordering import Order, ordered
from mucudnn.passes.placement.tiers import place_state
from mucudnn.passes.planning.place_step import PlacedStep
from mucudnn.runtime.profiling.profiler import OnNode
from mucudnn.runtime.profiling.tier_rates import measured_tiers
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.step.bounded_step import BoundedStep
from mucudnn.runtime.training.step.convolution_plans import (
    Plans,
    plan_convolutions,
    plans_by_node,
)
from mucudnn.runtime.training.step.resident_step import resident_step
from mucudnn.runtime.tuning.bound_plan import restore_plans
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["place_steps"]


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

    Raises:
        UnsupportedError: The placement is virtual, and the backend cannot map memory.
        PlanningError: A graph does not fit (the message names the missing and the
            sufficient bytes), or a convolution has no plan within the tuner's limit.
        OutOfMemoryError: A graph cannot be measured; names the sufficient bytes.
    """
    if budget is None:
        known = plan_convolutions(tuner, tuple(graphs), plans)
        found = [
            resident_step(tuner, graph, order, known, placement) for graph in graphs
        ]
    else:
        found = _within_budget(
            tuner, graphs, budget, first, order, plans, progress, placement
        )
    for plan in dict.fromkeys(p for placed in found for p in placed.plans.values()):
        restore_plans(tuner.backend, tuner.cache, plan)
    return found


def _within_budget(
    tuner: Tuner,
    graphs: Sequence[Graph],
    budget: MemoryBudget,
    first: int,
    order: str | Order,
    plans: Plans | None,
    progress: OnNode | None,
    placement: str,
) -> list[PlacedStep]:
    """Place graphs within a budget, the deciding one first.

    If that one is mapped in chunks, the others share its chunks; if not, none is.
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
            fixed = plans_by_node(final, plan_convolutions(tuner, (final,), plans))
        mine = budget
        if graph is not graphs[first]:
            mine = replace(budget, measured=None, found=None)
        return BoundedStep(
            *(tuner, final, mine, beside, hosted, fixed, placement),
            tiers=tiers,
            state=state,
        ).placed(progress)

    decided = within(graphs[first], None, placement)
    hosted = frozenset(decided.schedule.hosted)
    placement = STATIC if decided.layout.pages is None else VIRTUAL
    offloaded, state = decided.plan.prediction.placement, None
    if offloaded is not None:
        state = place_state(decided.schedule, offloaded.tiers)
    return [
        decided if i == first else within(graph, hosted, placement, state)
        for i, graph in enumerate(graphs)
    ]
