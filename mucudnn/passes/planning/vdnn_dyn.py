"""The dynamic policy of vDNN: the first of a row of configurations that fits.

The row begins with what is fastest and ends with what is smallest. Where vDNN runs a
step to see whether a configuration fits, this one schedules it.
"""

from collections.abc import Iterator, Mapping

from mucudnn.errors import PlanningError
from mucudnn.passes.planning.evaluate import check_residency, grown, plan_residency
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.residency import Residency
from mucudnn.passes.residency.published import keep_all, vdnn_all, vdnn_conv
from mucudnn.passes.scheduling.costs import first_plans
from mucudnn.passes.scheduling.step_plan import StepPlan

__all__ = ["check_vdnn_dyn", "vdnn_dyn"]


def vdnn_dyn(request: StepRequest) -> StepPlan:
    """The dynamic choice of Rhu et al., "vDNN", MICRO 2016, section 3.3.

    Offload everything with the convolutions that need least memory: what does not fit
    so cannot be trained. Then, with the fastest convolutions, offload nothing, the
    inputs of convolutions, all inputs; then, for the same two sets, give every
    convolution the fastest algorithm that the rest of the budget has room for; take
    the first that fits, or what was tried first. Convolutions that are fixed stay so.

    Raises:
        PlanningError: Not even the smallest configuration fits.
    """
    smallest = plan_residency(_with(request, "least"), vdnn_all(request))
    for attempt, residency in _attempts(request):
        try:
            return plan_residency(attempt, residency)
        except PlanningError:
            continue
    return smallest


def check_vdnn_dyn(request: StepRequest) -> None:
    """Refuse what the policy would refuse, without planning it.

    Raises:
        PlanningError: Not even the smallest configuration fits.
    """
    check_residency(_with(request, "least"), vdnn_all(request))


def _attempts(
    request: StepRequest,
) -> Iterator[tuple[StepRequest, Mapping[str, Residency]]]:
    sets = (vdnn_conv(request), vdnn_all(request))
    fastest = _with(request, "fastest")
    for residency in (keep_all(request), *sets):
        yield fastest, residency
    if request.convolutions != "fixed":
        for residency in sets:
            yield _greedy(request, residency), residency


def _with(request: StepRequest, convolutions: str) -> StepRequest:
    fixed = request.convolutions == "fixed"
    return request if fixed else request.convolving(convolutions)


def _greedy(request: StepRequest, residency: Mapping[str, Residency]) -> StepRequest:
    """Convolutions in order, each with the fastest algorithm that still fits."""
    ready = request.rewritten(residency)
    plans = first_plans(ready.profile, "least")
    try:
        _, occupancy = ready.problem(plans, request.budget).least()
    except PlanningError:
        return _with(request, "least")
    plans = grown(ready, plans, occupancy)
    return request.convolving("fixed", plans)
