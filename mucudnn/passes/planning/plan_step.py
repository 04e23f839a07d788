"""Plan a step by the policy that the request names.

Most policies choose residencies, from which everything else follows. Policies that also
choose convolution plans are functions from a request to a plan.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from mucudnn.errors import PlanningError
from mucudnn.ir.sizes import exact_bytes
from mucudnn.passes.planning.evaluate import check_residency, plan_residency
from mucudnn.passes.planning.least_budget import least_budget_above
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.search.collection import gc_relaxed
from mucudnn.passes.planning.search.search import search, smallest
from mucudnn.passes.planning.vdnn_dyn import check_vdnn_dyn, vdnn_dyn
from mucudnn.passes.residency import (
    PLANNED,
    VDNN_DYN,
    check_policy,
    decide,
    policy_names,
)
from mucudnn.passes.scheduling.intervals import budget_error
from mucudnn.passes.scheduling.step_plan import StepPlan

__all__ = [
    "PLANNED",
    "STEP_PLANNERS",
    "VDNN_DYN",
    "check_policy",
    "minimum_budget",
    "plan_of_least",
    "plan_step",
    "policy_names",
]

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
    nothing = request.within(0)
    try:
        _check(nothing)
    except PlanningError as e:
        found = _least(e, nothing)
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
        return plan_residency(request, smallest(request))
    return plan_residency(request, decide(request.policy, request))


def _check(request: StepRequest) -> None:
    """Raise the `PlanningError` that planning would raise, without a search."""
    if request.policy == PLANNED:
        smallest(request)
    elif request.policy == VDNN_DYN:
        check_vdnn_dyn(request)
    else:
        check_residency(request, decide(request.policy, request))


def _least(
    error: PlanningError, request: StepRequest
) -> tuple[int, PlanningError] | None:
    """Return the least budget above a refused one, and the refusal below it."""
    return least_budget_above(
        math.floor(request.budget),
        error,
        lambda nbytes: _check(request.within(nbytes)),
    )


def _advised(error: PlanningError, request: StepRequest) -> PlanningError:
    """Return the error with the minimum feasible budget and the shortfall."""
    found = _least(error, request)
    if found is None:
        return PlanningError(f"{error}; no budget works, however large")
    least, closest = found
    remedy = f"the least budget that works is {exact_bytes(least)}"
    node = closest.node or error.node
    if node is None:
        return PlanningError(
            f"{error}; {remedy}",
            short_by=least - math.floor(request.budget),
            least_bytes=least,
        )
    return budget_error(node, least, request.budget, remedy)
