"""The dynamic policy of vDNN: the first of a row of configurations that fits.

The row begins with what is fastest and ends with what is smallest. Where vDNN runs a
step to see whether a configuration fits, this one schedules it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mucudnn.errors import PlanningError
from mucudnn.passes.planning.evaluate import StepPlan, first_plans, grown
from mucudnn.passes.planning.trial import Trial
from mucudnn.passes.residency.choice import Residency
from mucudnn.passes.residency.published import keep_all, vdnn_all, vdnn_conv

__all__ = ["check_vdnn_dyn", "vdnn_dyn"]


def vdnn_dyn(trial: Trial) -> StepPlan:
    """The dynamic choice of Rhu et al., "vDNN", MICRO 2016, section 3.3.

    Offload everything with the convolutions that need least memory: what does not fit
    so cannot be trained. Then, with the fastest convolutions, offload nothing, the
    inputs of convolutions, all inputs; then, for the same two sets, give every
    convolution the fastest algorithm that the rest of the budget has room for; take
    the first that fits, or what was tried first. Convolutions that are fixed stay so.

    Raises:
        PlanningError: Not even the smallest configuration fits.
    """
    smallest = _with(trial, "least")(vdnn_all(trial.step))
    for attempt, residency in _attempts(trial):
        try:
            return attempt(residency)
        except PlanningError:
            continue
    return smallest


def check_vdnn_dyn(trial: Trial) -> None:
    """Refuse what the policy would refuse, without planning it.

    Raises:
        PlanningError: Not even the smallest configuration fits.
    """
    _with(trial, "least").check(vdnn_all(trial.step))


def _attempts(trial: Trial) -> Iterator[tuple[Trial, Mapping[str, Residency]]]:
    step = trial.step
    sets = (vdnn_conv(step), vdnn_all(step))
    fastest = _with(trial, "fastest")
    for residency in (keep_all(step), *sets):
        yield fastest, residency
    if trial.convolutions != "fixed":
        for residency in sets:
            yield _greedy(trial, residency), residency


def _with(trial: Trial, convolutions: str) -> Trial:
    if trial.convolutions == "fixed":
        return trial
    return replace(trial, convolutions=convolutions)


def _greedy(trial: Trial, residency: Mapping[str, Residency]) -> Trial:
    """Convolutions in order, each with the fastest algorithm that still fits."""
    ready = trial.preparer(residency)
    plans = first_plans(ready.profile, "least", None)
    try:
        _, occupancy = ready.problem(plans, trial.step.budget).least()
    except PlanningError:
        return _with(trial, "least")
    plans = grown(ready.graph, ready.profile, plans, occupancy)
    return replace(trial, convolutions="fixed", plans=plans)
