"""A step plan with places: what is promised is the size of the arena, not a sum.

Static offsets may need a little more than the most bytes in use at once. Then the plan
is made again for that much less, so that state and arena together keep the budget.
What is carried from step to step is hardest to place: at both ends of the step it must
lie beside all else that is. So the last resort is to carry less.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.ir.profile import Profile
from mucudnn.passes.holes import grow_into_holes
from mucudnn.passes.layout import Layout, lay_out
from mucudnn.passes.planned import PLANNED, VDNN_DYN, plan_step
from mucudnn.passes.schedulers import SCHEDULERS
from mucudnn.passes.step_plan import Preparer, StepPlan, plan_residency, state_bytes

__all__ = ["PlacedStep", "place_step"]

_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """A planned step, and where everything is.

    Attributes:
        plan: What is run.
        layout: Offsets in an arena.
        state_bytes: Parameters and state that never leave, beside the arena.
    """

    plan: StepPlan
    layout: Layout
    state_bytes: int

    @property
    def nbytes(self) -> int:
        """Device memory of the step, all of it."""
        return self.layout.nbytes + self.state_bytes


def place_step(
    graph: Graph,
    profile: Profile,
    *,
    budget: float,
    policy: str = PLANNED,
    scheduler: str | None = None,
    convolutions: str = "dynamic",
    plans: Mapping[str, ConvPlan] | None = None,
    hosted: frozenset[str] | None = None,
) -> PlacedStep:
    """Plan a step such that its arena and its state fit a budget.

    Args:
        graph: A training graph that nothing has made in-place yet.
        profile: Of it.
        budget: Bytes for everything.
        policy: Decides what leaves, and what is computed again.
        scheduler: Times the copies.
        convolutions: How convolutions get their workspace.
        plans: Convolution node -> plan, if they are fixed.
        hosted: Parameters and state whose home is the host, if that is decided.

    Raises:
        PlanningError: It cannot fit; says how many bytes short.
    """

    def search(target: float) -> StepPlan:
        return plan_step(
            graph,
            profile,
            budget=target,
            policy=policy,
            scheduler=scheduler,
            convolutions=convolutions,
            plans=plans,
            hosted=hosted,
        )

    target = budget
    plan = search(target)
    preparer = Preparer(graph, profile, hosted)
    for _ in range(_ATTEMPTS):
        placed = _placed(plan, profile, convolutions, budget)
        over = placed.nbytes - budget
        if over <= 0:
            return placed
        target = min(target, plan.peak_bytes) - over
        try:
            plan = plan_residency(
                graph,
                profile,
                plan.residency,
                budget=target,
                scheduler=plan.scheduler,
                convolutions="fixed" if plans is not None else convolutions,
                plans=plans,
                policy=plan.policy,
                preparer=preparer,
            )
        except PlanningError:  # these residencies cannot give way any further
            try:
                plan = search(target)
            except PlanningError:
                break
    others = (
        ()
        if scheduler is not None
        else _carrying_less(graph, profile, plan, budget, convolutions, plans, hosted)
    )
    found = [_placed(other, profile, convolutions, budget) for other in others]
    fitting = [other for other in found if other.nbytes <= budget]
    if fitting:
        return min(fitting, key=lambda other: other.plan.prediction.step_ms)
    raise PlanningError(
        f"places for {plan.peak_bytes} bytes could not be found within "
        f"{int(budget)} bytes; {placed.nbytes} would do"
    )


def _carrying_less(
    graph: Graph,
    profile: Profile,
    plan: StepPlan,
    budget: float,
    convolutions: str,
    plans: Mapping[str, ConvPlan] | None,
    hosted: frozenset[str] | None,
) -> Iterator[StepPlan]:
    """A plan's residencies with parameters and state that leave in every step.

    Only those that do already, or all of them.
    """
    everything = frozenset(spec.name for spec in graph.with_role(*PERSISTENT))
    homes = (
        (frozenset(plan.schedule.hosted), everything) if hosted is None else (hosted,)
    )
    for home, name in itertools.product(homes, SCHEDULERS.table):
        with suppress(PlanningError):
            yield plan_residency(
                graph,
                profile,
                plan.residency,
                budget=budget,
                scheduler=name,
                convolutions="fixed" if plans is not None else convolutions,
                plans=plans,
                policy=plan.policy,
                preparer=Preparer(graph, profile, home),
            )


def _placed(
    plan: StepPlan, profile: Profile, convolutions: str, budget: float
) -> PlacedStep:
    """Places for a step, workspaces in the holes between its tensors if they may."""
    state = state_bytes(plan.schedule.graph, plan.schedule.resident)
    unlimited = math.isinf(budget)
    if convolutions != "dynamic" or plan.policy == VDNN_DYN or unlimited:
        return PlacedStep(plan, lay_out(plan.schedule), state)
    found, layout = grow_into_holes(
        plan, profile, arena_bytes=int(budget) - state, resident=state
    )
    return PlacedStep(found, layout, state)
