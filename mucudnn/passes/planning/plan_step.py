"""Plan a step by the policy of a request; least budgets and comparisons.

Most policies choose residencies, from which everything else follows. Policies that also
choose convolution plans are functions from a request to a plan.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from mucudnn.arguments import check_number
from mucudnn.errors import PlanningError
from mucudnn.ir.fleet import ScalingRow
from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import exact_bytes
from mucudnn.passes.placement.layout import PlacedStep
from mucudnn.passes.planning.cutting import Split, SplitStep
from mucudnn.passes.planning.request import StepRequest, check_residency, plan_residency
from mucudnn.passes.planning.search import (
    check_vdnn_dyn,
    least_memory,
    search,
    vdnn_dyn,
)
from mucudnn.passes.registry import name_of
from mucudnn.passes.residency import PLANNED, VDNN_DYN, decide
from mucudnn.passes.scheduling.intervals import budget_error
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.processes import gc_relaxed

STEP_PLANNERS: Mapping[str, Callable[[StepRequest], StepPlan]] = MappingProxyType(
    {PLANNED: search, VDNN_DYN: vdnn_dyn}
)
"""Policies that return a whole plan instead of residencies."""


def plan_step(request: StepRequest) -> StepPlan:
    """Plan a training step under a budget by a policy.

    Raises:
        PlanningError: The step cannot fit; has the shortfall, the node, and the minimum
            feasible budget.
        ValueError: A user's policy names unknown tensors.
        TypeError: A user's policy returns something other than residencies.
    """
    policy = request.policy
    try:
        if isinstance(policy, str) and policy in STEP_PLANNERS:
            return STEP_PLANNERS[policy](request)
        return plan_residency(request, decide(policy, request))
    except PlanningError as e:
        if math.isinf(request.budget):
            raise
        raise _advised(e, request) from None


@gc_relaxed()
def minimum_budget(request: StepRequest) -> int:
    """Return the minimum feasible budget in bytes; the request's budget is ignored.

    For a policy that needs more under a larger budget, the result is a budget that
    works where one byte less does not.

    Raises:
        PlanningError: No budget works, however large.
    """
    try:
        _check_within(request, 0)
    except PlanningError as e:
        found = least_budget_above(0, e, partial(_check_within, request))
        if found is None:
            raise
        return found[0]
    return 0


def plan_of_least(request: StepRequest) -> StepPlan:
    """Plan the step in `minimum_budget`, without searching for a fast plan."""
    request = request.within(minimum_budget(request))
    if request.policy == VDNN_DYN:
        return vdnn_dyn(request)
    if request.policy == PLANNED:
        return plan_residency(request, least_memory(request))
    return plan_residency(request, decide(request.policy, request))


def _check_within(request: StepRequest, nbytes: int) -> None:
    """Raise the `PlanningError` of planning within a budget, without a search."""
    request = request.within(nbytes)
    if request.policy == PLANNED:
        least_memory(request)
    elif request.policy == VDNN_DYN:
        check_vdnn_dyn(request)
    else:
        check_residency(request, decide(request.policy, request))


def _advised(error: PlanningError, request: StepRequest) -> PlanningError:
    """Return the error with the minimum feasible budget and the shortfall."""
    refused, attempt = math.floor(request.budget), partial(_check_within, request)
    found = least_budget_above(refused, error, attempt)
    if found is None:
        return PlanningError(f"{error}; no budget works, however large")
    least, closest = found
    remedy = f"the least budget that works is {exact_bytes(least)}"
    node = closest.node or error.node
    if node is None:
        return PlanningError(
            f"{error}; {remedy}", short_by=least - refused, least_bytes=least
        )
    return budget_error(node, least, request.budget, remedy)


# Search for the minimum feasible budget by repeated planning.
#
# A refusal reports how many bytes are missing, so the second attempt mostly succeeds. A
# policy that depends on the budget may need more under a larger one, and a user's
# policy may report nothing: then budgets grow until one works, and the range below is
# bisected. The result works, and one byte less does not.


_MOST = 1 << 62
"""Budget in bytes that counts as unlimited."""

_PATIENCE = 8
"""Attempts that follow the refusals' reports before budgets grow faster."""


def least_budget_above(
    refused: int, error: PlanningError, attempt: Callable[[int], object]
) -> tuple[int, PlanningError] | None:
    """Return the least budget that works above one that does not.

    Returns:
        The budget, and the last refusal of a smaller one; None if none works.
    """

    def refusal(budget: int) -> PlanningError | None:
        try:
            attempt(budget)
        except PlanningError as e:
            return copy(e)  # without a traceback, which would hold callers' locals
        return None

    low, stride = refused, 1
    for asked in range(_MOST.bit_length() + _PATIENCE):
        high = error.least_bytes or 0
        if high <= low or asked >= _PATIENCE:
            high = max(high, min(low + stride, _MOST))
            stride *= 4
        if (found := refusal(high)) is None:
            break
        if high >= _MOST:
            return None
        low, error = high, found
    else:
        return None
    # Bisect the range; the first guess is that nothing less works.
    middle = high - 1
    while high - low > 1:
        if (found := refusal(middle)) is None:
            high = middle
        else:
            low, error = middle, found
        middle = (low + high) // 2
    return high, error


# Compare policies on one step; a policy that does not fit reports its shortfall.


_SIMPLEST = "keep_all"

T = TypeVar("T")

_FAST = 1.15
"""Slowdown up to which a form of a step is not compared with the next form. Without
fusion a step of ResNet-50 takes 1.14 to 1.20 times as long if there is no budget, and
within budgets that slow the fused step down by 1.17 it was slower still."""


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """Result of a policy and a scheduler under a budget.

    Attributes:
        policy: Name of the policy.
        scheduler: Name of the scheduler.
        budget: Budget in bytes.
        plan: Plan within the budget, or None.
        least_bytes: Minimum feasible budget of the policy, if it does not fit.
        request: What was planned, if that is known.
        placed: The plan with its layout, if it was placed.
    """

    policy: str
    scheduler: str
    budget: int
    plan: StepPlan | None
    least_bytes: int | None = None
    request: StepRequest | None = field(default=None, repr=False)
    placed: PlacedStep | None = field(default=None, repr=False)

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


def try_technique(request: StepRequest) -> PolicyResult:
    """Plan a step by one policy, and by the request's scheduler or the fastest one."""
    policy, budget = name_of(request.policy), int(request.budget)
    try:
        plan = plan_step(request)
    except PlanningError as e:
        timing = name_of(request.timing)
        return PolicyResult(policy, timing, budget, None, e.least_bytes, request)
    return PolicyResult(policy, plan.scheduler, budget, plan, request=request)


def best_technique(techniques: Iterable[PolicyResult]) -> PolicyResult | None:
    """Return the fastest technique that fits; ties: lowest peak, then simplest."""
    fitting = [t for t in techniques if t.step_ms is not None]
    return min(
        fitting,
        key=lambda t: (t.step_ms or 0.0, t.peak_bytes, t.policy != _SIMPLEST),
        default=None,
    )


def fastest_form(
    results: Iterable[T],
    plan_of: Callable[[T], StepPlan | None],
    *,
    compare: bool = True,
    agree: Callable[[float, bool], tuple[float, bool]] = lambda ms, slow: (ms, slow),
) -> T | None:
    """Return the fastest form of a step; plan no further form after one that is fast.

    A fused step is faster without a budget, but has fewer tensors between which a
    budget can choose. `study_memory` and `Trainer` decide by this function alike.

    Args:
        results: Results of planning the forms, the preferred form first, each made
            when the iterator is advanced.
        plan_of: Returns the plan of a result; None if the form does not fit.
        compare: Whether a form that fits is compared with others if it is slow.
        agree: Returns, over all ranks, the longest time and whether any is slow.

    Returns:
        The chosen result, the last one if no form fits; None without any result.
    """
    best: T | None = None
    best_ms = math.inf
    for result in results:
        plan = plan_of(result)
        own_ms = math.inf if plan is None else plan.prediction.step_ms
        slow = plan is None or (compare and _is_slow(plan))
        step_ms, slow = agree(own_ms, slow)
        if step_ms < best_ms or math.isinf(best_ms):
            best, best_ms = result, step_ms
        if not slow:
            break
    return best


def _is_slow(plan: StepPlan) -> bool:
    """Return whether a step is much slower than the same form without a budget."""
    return plan.prediction.step_ms > _FAST * plan.unbounded_ms


def largest_batch_within(
    least: Callable[[int], int], budget: int, *, start: int = 1, most: int = 1 << 20
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
    """
    low, known = 0, 0
    high = min(start, most)
    while (need := least(high)) <= budget:
        low, known = high, need
        if high == most:
            return most
        high = min(2 * high, most)
    for guess in itertools.count(1):
        if high - low <= 1:
            break
        share = (budget - known) / (need - known) if guess % 3 else 0.5
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        found = least(middle)
        if found <= budget:
            low, known = middle, found
        else:
            high, need = middle, found
    return low


_BATCH_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Batches of which the throughput is predicted, as shares of the largest."""


def batches_to_compare(most: int) -> tuple[int, ...]:
    """Return batches up to the largest one, ascending, to compare their throughput.

    The largest batch is often not the fastest: it is planned in the least memory that
    works, so more is copied and recomputed for every sample.
    """
    return tuple(sorted({math.ceil(share * most) for share in _BATCH_SHARES} - {0}))


_FINEST = 64
"""Parts of the range of useful budgets to which a budget for a slowdown is found."""

_EQUAL = 1 + 1e-9
"""Factor within which two slowdowns are equal: sums of times are rounded."""


def budget_for_slowdown(
    slowdown: float, least: int, most: int, slowdown_at: Callable[[int], float]
) -> int:
    """Return about the least budget in which a step is no slower than wanted.

    The range is bisected, as slowdowns hardly ever grow with the budget. The result is
    a budget whose plan was seen to be fast enough.

    Args:
        slowdown: Wanted time relative to the step without a budget, at least 1.
        least: The minimum feasible budget.
        most: A budget that does not slow down the step.
        slowdown_at: Plans the step within a budget and returns the slowdown.

    Raises:
        ValueError: The slowdown is less than 1, or not a number.
        PlanningError: Not even within `most` is the step fast enough.
    """
    check_number("slowdown", slowdown, 1.0)
    if slowdown_at(least) <= slowdown * _EQUAL:
        return least
    low, high = least, (most := max(least, most))
    while high - low > max(1, (most - least) // _FINEST):
        middle = (low + high) // 2
        if slowdown_at(middle) <= slowdown * _EQUAL:
            high = middle
        else:
            low = middle
    if high == most and (best := slowdown_at(most)) > slowdown * _EQUAL:
        raise PlanningError(
            f"no budget keeps a slowdown of {slowdown:g}: even within "
            f"{exact_bytes(most)} the step takes {best:.4g} times as long as without"
        )
    return high


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedStep:
    """A training step of another framework, as planning requests and facts.

    Attributes:
        title: Name of the model.
        batch: Samples in a mini-batch.
        image: Shape of a sample.
        parameters: Number of elements of all parameters.
        optimizer: Name of the optimizer.
        device: Device of the costs: `cpu`, or a name in `DEVICES`.
        figures: Sources of the costs, in words.
        request: Function from a batch to the planning request, without a budget.
        in_parts: Function from a split to the step whole and in parts, planned without
            a budget; None for a step that always runs whole.
        order: Order of the nodes, in words.
        scaling: Returns the fastest way that fits for several numbers of devices, given
            the bytes of one; None for a step of one device.
    """

    title: str
    batch: int
    image: tuple[int, ...]
    parameters: int
    optimizer: str
    device: str
    figures: Mapping[str, str]
    request: Callable[[int], StepRequest]
    in_parts: Callable[[Split], SplitStep | None] | None = None
    order: str = "as captured"
    scaling: Callable[[float], Sequence[ScalingRow]] | None = None

    def graph(self, batch: int | None = None) -> Graph:
        """Return the step's graph, for another batch if given."""
        return self.request(batch or self.batch).graph
