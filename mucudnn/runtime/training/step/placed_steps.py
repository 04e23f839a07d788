"""From graphs to what an executor runs: costs, a request, a step with places.

With a budget, what a graph costs is measured. Without one everything stays on the
device, and sizes are all that needs to be known: the same road, with a sketch for a
profile and no end to the memory.

Graphs that share parameters and state must agree about which of them never leave: the
first to be planned decides.
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
        found = [
            resident_step(tuner, graph, order, known, placement) for graph in graphs
        ]
    else:
        found = _together(
            tuner, graphs, budget, first, order, plans, progress, placement
        )
    for plan in dict.fromkeys(p for placed in found for p in placed.plans.values()):
        restore_plans(tuner.backend, tuner.cache, plan)
    return found


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
    away, state = decided.plan.prediction.placement, None
    if away is not None:
        state = place_state(decided.schedule, away.tiers)
    return [
        decided if i == first else within(graph, hosted, placement, state)
        for i, graph in enumerate(graphs)
    ]
