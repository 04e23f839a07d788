"""A request in, a plan out: every policy by its name.

Most policies choose residencies; what else there is to decide follows. Some decide the
convolutions' plans as well: those are functions of the request that return a plan.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from mucudnn.errors import PlanningError
from mucudnn.ir.sizes import exact_bytes
from mucudnn.passes.planning.evaluate import check_residency, plan_residency
from mucudnn.passes.planning.least_budget import least_budget_above
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.search.collection import rarely_collected
from mucudnn.passes.planning.search.search import search, smallest
from mucudnn.passes.planning.vdnn_dyn import check_vdnn_dyn, vdnn_dyn
from mucudnn.passes.residency import (
    PLANNED,
    VDNN_DYN,
    check_policy,
    decide,
    policy_names,
)
from mucudnn.passes.scheduling.intervals import short_of
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
"""Policies that decide more than residencies."""


def plan_step(request: StepRequest) -> StepPlan:
    """A training step under a budget, by a policy.

    Raises:
        PlanningError: It cannot fit; says how many bytes short, at which node, and the
            least budget that works.
        ValueError: A policy of one's own decides on tensors that there are not.
        TypeError: It decides on something else than residencies.
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


@rarely_collected()
def minimum_budget(request: StepRequest) -> int:
    """The least bytes, parameters and state included, that a step is planned in.

    A policy that looks at the budget may need more under a larger one; what is found
    is a budget that works, next to one that does not.

    Args:
        request: What is asked; whatever its budget is.

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
    """The step in `minimum_budget`; a search does not go beyond finding that it fits.

    Raises:
        PlanningError: No budget works, however large.
    """
    request = request.within(minimum_budget(request))
    if request.policy == VDNN_DYN:
        return vdnn_dyn(request)
    if request.policy == PLANNED:
        return plan_residency(request, smallest(request))
    return plan_residency(request, decide(request.policy, request))


def _check(request: StepRequest) -> None:
    """Refuse what planning would refuse, without a search.

    Raises:
        PlanningError: It cannot fit.
    """
    if request.policy == PLANNED:
        smallest(request)
    elif request.policy == VDNN_DYN:
        check_vdnn_dyn(request)
    else:
        check_residency(request, decide(request.policy, request))


def _least(
    error: PlanningError, request: StepRequest
) -> tuple[int, PlanningError] | None:
    """The least budget above one that was refused, and what refused less."""
    return least_budget_above(
        math.floor(request.budget),
        error,
        lambda nbytes: _check(request.within(nbytes)),
    )


def _advised(error: PlanningError, request: StepRequest) -> PlanningError:
    """The error with the least budget that works, by which the budget is short."""
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
    return short_of(node, least, request.budget, remedy)
