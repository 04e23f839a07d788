"""The dynamic policy of vDNN: the first of a sequence of configurations that fits.

The sequence goes from the fastest to the smallest configuration. Where vDNN runs a step
to find out whether a configuration fits, this policy schedules it.
"""

from collections.abc import Iterator, Mapping

from mucudnn.errors import PlanningError
from mucudnn.passes.planning.request import (
    StepRequest,
    check_residency,
    grow_workspace_plans,
    plan_residency,
)
from mucudnn.passes.residency import Residency
from mucudnn.passes.residency.policies import keep_all, vdnn_all, vdnn_conv
from mucudnn.passes.scheduling.problem import first_plans
from mucudnn.passes.scheduling.step_plan import StepPlan


def vdnn_dyn(request: StepRequest) -> StepPlan:
    """Plan by the dynamic policy of Rhu et al., "vDNN", MICRO 2016, section 3.3.

    First offload everything with the smallest convolutions: a step that does not fit
    then cannot be trained. Then, with the fastest convolutions, offload nothing, the
    inputs of convolutions, all inputs; then, for the last two sets, give every
    convolution the fastest algorithm that fits the remaining budget. The first of these
    that fits is chosen, else the very first. Fixed convolutions stay fixed.

    Raises:
        PlanningError: Not even the smallest configuration fits.
    """
    smallest = plan_residency(_with_convolutions(request, "least"), vdnn_all(request))
    for attempt, residency in _attempts(request):
        try:
            return plan_residency(attempt, residency)
        except PlanningError:
            continue
    return smallest


def check_vdnn_dyn(request: StepRequest) -> None:
    """Raise the `PlanningError` that `vdnn_dyn` would raise, without planning."""
    check_residency(_with_convolutions(request, "least"), vdnn_all(request))


def _attempts(
    request: StepRequest,
) -> Iterator[tuple[StepRequest, Mapping[str, Residency]]]:
    sets = (vdnn_conv(request), vdnn_all(request))
    fastest = _with_convolutions(request, "fastest")
    for residency in (keep_all(request), *sets):
        yield fastest, residency
    if request.convolutions != "fixed":
        for residency in sets:
            yield _greedy(request, residency), residency


def _with_convolutions(request: StepRequest, convolutions: str) -> StepRequest:
    fixed = request.convolutions == "fixed"
    return request if fixed else request.convolving(convolutions)


def _greedy(request: StepRequest, residency: Mapping[str, Residency]) -> StepRequest:
    """Give convolutions, in order, the fastest algorithm that still fits."""
    ready = request.rewritten(residency)
    plans = first_plans(ready.profile, "least")
    try:
        _, occupancy = ready.problem(plans, request.budget).least()
    except PlanningError:
        return _with_convolutions(request, "least")
    plans = grow_workspace_plans(ready, plans, occupancy)
    return request.convolving("fixed", plans)
