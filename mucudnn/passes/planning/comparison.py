"""Compare policies on one step; a policy that does not fit reports its shortfall."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mucudnn.errors import PlanningError
from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.passes.planning.evaluate import plan_residency
from mucudnn.passes.planning.plan_step import plan_step
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.registry import name_of
from mucudnn.passes.scheduling.step_plan import StepPlan

__all__ = [
    "Technique",
    "best_technique",
    "largest_batch_within",
    "try_technique",
    "unbounded",
]

_SIMPLEST = "keep_all"


@dataclass(frozen=True, slots=True)
class Technique:
    """Result of a policy and a scheduler under a budget.

    Attributes:
        policy: Name of the policy.
        scheduler: Name of the scheduler.
        budget: Budget in bytes.
        plan: Plan within the budget, or None.
        least_bytes: Minimum feasible budget of the policy, if it does not fit.
    """

    policy: str
    scheduler: str
    budget: int
    plan: StepPlan | None
    least_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """True if the policy fits the budget."""
        return self.plan is not None

    @property
    def peak_bytes(self) -> int:
        """Peak of the plan, or the minimum feasible budget without one."""
        if self.plan is not None:
            return self.plan.peak_bytes
        return self.least_bytes or 0

    @property
    def short_bytes(self) -> int:
        """Bytes by which the budget is too small."""
        return 0 if self.plan is not None else self.peak_bytes - self.budget

    @property
    def step_ms(self) -> float | None:
        """Predicted time of a step, or None."""
        return None if self.plan is None else self.plan.prediction.step_ms


def unbounded(graph: Graph, profile: Profile) -> StepPlan:
    """Plan the step without a budget: fastest algorithms, no offload."""
    return plan_residency(StepRequest(graph, profile, policy="keep_all"), {})


def try_technique(request: StepRequest) -> Technique:
    """Plan a step by one policy, and by the request's scheduler or the fastest one."""
    policy, budget = name_of(request.policy), int(request.budget)
    try:
        plan = plan_step(request)
    except PlanningError as e:
        scheduler = name_of(request.timing)
        return Technique(policy, scheduler, budget, None, e.least_bytes)
    return Technique(policy, plan.scheduler, budget, plan)


def best_technique(techniques: Iterable[Technique]) -> Technique | None:
    """Return the fastest technique that fits; ties: lowest peak, then simplest."""
    fitting = [t for t in techniques if t.step_ms is not None]
    return min(
        fitting,
        key=lambda t: (t.step_ms or 0.0, t.peak_bytes, t.policy != _SIMPLEST),
        default=None,
    )


def largest_batch_within(
    least: Callable[[int], int],
    budget: int,
    *,
    start: int = 1,
    most: int = 1 << 20,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Return the largest mini-batch within a budget; 0 if there is none.

    Memory is nearly linear in the batch where samples outweigh parameters. Batches
    double until the budget is exceeded; then the range is narrowed by interpolation,
    with a bisection now and then in case the curve bends.

    Args:
        least: Minimum feasible budget of a batch, non-decreasing.
        budget: Budget in bytes.
        start: First batch to try.
        most: Largest batch to try.
        progress: Called with every batch before it is tried.
    """

    def needs(batch: int) -> int:
        if progress is not None:
            progress(batch)
        return least(batch)

    low, known = 0, 0
    high = min(start, most)
    while (need := needs(high)) <= budget:
        low, known = high, need
        if high == most:
            return most
        high = min(2 * high, most)
    for guess in itertools.count(1):
        if high - low <= 1:
            break
        share = (budget - known) / (need - known) if guess % 3 else 0.5
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        found = needs(middle)
        if found <= budget:
            low, known = middle, found
        else:
            high, need = middle, found
    return low
