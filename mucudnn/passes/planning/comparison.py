"""Every policy on one step: what it needs, what it moves, what it costs.

A policy that does not fit is a row too: it says how many bytes it is short of.
"""

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
    """A policy and a scheduler under a budget.

    Attributes:
        policy: Name.
        scheduler: Name.
        budget: Bytes.
        plan: Within the budget; None where there is none.
        least_bytes: What the policy needs at the least, where it does not fit.
    """

    policy: str
    scheduler: str
    budget: int
    plan: StepPlan | None
    least_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.plan is not None

    @property
    def peak_bytes(self) -> int:
        """The plan's; without one, what the policy needs at the least."""
        if self.plan is not None:
            return self.plan.peak_bytes
        return self.least_bytes or 0

    @property
    def short_bytes(self) -> int:
        """By how much the budget is too small."""
        return 0 if self.plan is not None else self.peak_bytes - self.budget

    @property
    def step_ms(self) -> float | None:
        """Predicted time of a step."""
        return None if self.plan is None else self.plan.prediction.step_ms


def unbounded(graph: Graph, profile: Profile) -> StepPlan:
    """The step with all the memory it could use: the fastest plans, nothing moved."""
    return plan_residency(StepRequest(graph, profile, policy="keep_all"), {})


def try_technique(request: StepRequest) -> Technique:
    """Plan a step by one policy, and by one scheduler if the request names one.

    Else a search takes whichever is fastest, and the technique says which that was.
    """
    policy, budget = name_of(request.policy), int(request.budget)
    try:
        plan = plan_step(request)
    except PlanningError as e:
        scheduler = name_of(request.timing)
        return Technique(policy, scheduler, budget, None, e.least_bytes)
    return Technique(policy, plan.scheduler, budget, plan)


def best_technique(techniques: Iterable[Technique]) -> Technique | None:
    """The fastest that fits; of equally fast ones the lowest peak, the simplest."""
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
    """The largest mini-batch within a budget; 0 if none is.

    What a step needs is nearly a straight line where samples outweigh parameters. So
    batches double until the budget is exceeded, and the line through the last ones says
    where that happens; now and then the range is halved, lest a bend in it takes long.

    Args:
        least: The least budget of a batch; a larger one needs no less.
        budget: Bytes.
        start: The first batch that is tried.
        most: Where to stop looking.
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
