"""A budget in, a plan out: every policy by its name.

Most policies choose residencies; what else there is to decide follows. Some decide the
convolutions' plans as well: those are functions of a trial.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import exact_bytes
from mucudnn.passes.planning.evaluate import Preparer, StepPlan
from mucudnn.passes.planning.least_budget import least_budget_above
from mucudnn.passes.planning.trial import Trial
from mucudnn.passes.residency import (
    PLANNED,
    POLICIES,
    VDNN_DYN,
    ResidencyPolicy,
    Step,
    decide,
)
from mucudnn.passes.residency.search import search, smallest
from mucudnn.passes.residency.vdnn_dyn import check_vdnn_dyn, vdnn_dyn
from mucudnn.passes.scheduling import SCHEDULERS, Scheduler
from mucudnn.passes.scheduling.intervals import short_of

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

STEP_PLANNERS: Mapping[str, Callable[[Trial], StepPlan]] = MappingProxyType(
    {PLANNED: search, VDNN_DYN: vdnn_dyn}
)
"""Policies that decide more than residencies."""


def policy_names() -> tuple[str, ...]:
    """What `plan_step` takes as a policy, beside functions."""
    return (*STEP_PLANNERS, *POLICIES.names)


def check_policy(policy: str | ResidencyPolicy) -> None:
    """Refuse what `plan_step` would not take as a policy.

    Raises:
        ValueError: A name is not known; the message lists those that are.
        TypeError: It is neither a name nor a function.
    """
    if isinstance(policy, str):
        if policy in STEP_PLANNERS or policy in POLICIES.table:
            return
        names = policy_names()
        if policy not in names:
            valid = ", ".join(sorted(names))
            raise ValueError(f"unknown policy {policy!r}; choose one of: {valid}")
    POLICIES.resolve(policy)


def plan_step(
    graph: Graph,
    profile: Profile,
    *,
    budget: float,
    policy: str | ResidencyPolicy = PLANNED,
    scheduler: str | Scheduler | None = None,
    convolutions: str = "dynamic",
    plans: Mapping[str, ConvPlan] | None = None,
    hosted: frozenset[str] | None = None,
) -> StepPlan:
    """A training step under a budget, by a policy.

    Args:
        graph: A training graph that nothing has made in-place yet.
        profile: Of it.
        budget: Bytes for everything, parameters and state included.
        policy: One of `policy_names`, or a function.
        scheduler: Times the copies, a name or a function; if not given, `on_demand`
            for vDNN's dynamic policy, any for the search, else `timed`.
        convolutions: How convolutions get their workspace.
        plans: Convolution node -> plan, if they are fixed.
        hosted: Parameters and state whose home is the host, and no others, if that is
            decided: by another step that shares them.

    Raises:
        PlanningError: It cannot fit; says how many bytes short, at which node, and the
            least budget that works.
        ValueError: A name is not known, or a policy of one's own decides on tensors
            that there are not.
        TypeError: A strategy is neither a name nor a function.
    """
    trial = _trial(
        graph, profile, budget, policy, scheduler, convolutions, plans, hosted
    )
    try:
        if isinstance(policy, str) and policy in STEP_PLANNERS:
            return STEP_PLANNERS[policy](trial)
        return trial(decide(policy, trial.step))
    except PlanningError as e:
        if math.isinf(budget):
            raise
        raise _advised(e, trial) from None


def minimum_budget(
    graph: Graph,
    profile: Profile,
    *,
    policy: str | ResidencyPolicy = PLANNED,
    scheduler: str | Scheduler | None = None,
    convolutions: str = "dynamic",
    plans: Mapping[str, ConvPlan] | None = None,
    hosted: frozenset[str] | None = None,
) -> int:
    """The least bytes, parameters and state included, that a step is planned in.

    A policy that looks at the budget may need more under a larger one; what is found
    is a budget that works, next to one that does not.

    Args:
        graph: See `plan_step`; the others as well.
        profile: Of it.
        policy: Decides.
        scheduler: Times the copies.
        convolutions: How convolutions get their workspace.
        plans: Convolution node -> plan, if they are fixed.
        hosted: Parameters and state whose home is the host, if that is decided.

    Raises:
        PlanningError: No budget works, however large.
    """
    return _minimum(
        _trial(graph, profile, -1, policy, scheduler, convolutions, plans, hosted)
    )


def plan_of_least(
    graph: Graph,
    profile: Profile,
    *,
    policy: str | ResidencyPolicy = PLANNED,
    scheduler: str | Scheduler | None = None,
    convolutions: str = "dynamic",
    plans: Mapping[str, ConvPlan] | None = None,
    hosted: frozenset[str] | None = None,
) -> StepPlan:
    """The step in `minimum_budget`; a search does not go beyond finding that it fits.

    Raises:
        PlanningError: No budget works, however large.
    """
    trial = _trial(graph, profile, -1, policy, scheduler, convolutions, plans, hosted)
    trial = trial.within(_minimum(trial))
    if policy == VDNN_DYN:
        return vdnn_dyn(trial)
    if policy == PLANNED:
        return trial(smallest(trial))
    return trial(decide(policy, trial.step))


def _trial(
    graph: Graph,
    profile: Profile,
    budget: float,
    policy: str | ResidencyPolicy,
    scheduler: str | Scheduler | None,
    convolutions: str,
    plans: Mapping[str, ConvPlan] | None,
    hosted: frozenset[str] | None,
) -> Trial:
    check_policy(policy)
    if scheduler is not None:
        SCHEDULERS.resolve(scheduler)
    default = "on_demand" if policy == VDNN_DYN else "timed"
    return Trial(
        step=Step(graph, profile, budget, hosted),
        preparer=Preparer(graph, profile, hosted),
        policy=policy,
        scheduler=default if scheduler is None else scheduler,
        any_scheduler=scheduler is None,
        convolutions=convolutions,
        plans=plans,
    )


def _minimum(trial: Trial) -> int:
    """The least budget that a trial is planned in, whose own is below all that work.

    Raises:
        PlanningError: No budget works, however large.
    """
    try:
        _check(trial)
    except PlanningError as e:
        found = _least(e, trial)
        if found is None:
            raise
        return found[0]
    return 0


def _check(trial: Trial) -> None:
    """Refuse what planning would refuse, without a search.

    Raises:
        PlanningError: It cannot fit.
    """
    if trial.policy == PLANNED:
        smallest(trial)
    elif trial.policy == VDNN_DYN:
        check_vdnn_dyn(trial)
    else:
        trial.check(decide(trial.policy, trial.step))


def _least(error: PlanningError, trial: Trial) -> tuple[int, PlanningError] | None:
    """The least budget above a trial's, which was refused, and what refused less."""
    return least_budget_above(
        math.floor(trial.step.budget),
        error,
        lambda nbytes: _check(trial.within(nbytes)),
    )


def _advised(error: PlanningError, trial: Trial) -> PlanningError:
    """The error with the least budget that works, by which the budget is short."""
    found = _least(error, trial)
    if found is None:
        return PlanningError(f"{error}; no budget works, however large")
    least, closest = found
    remedy = f"the least budget that works is {exact_bytes(least)}"
    node = closest.node or error.node
    if node is None:
        return PlanningError(
            f"{error}; {remedy}",
            short_by=least - math.floor(trial.step.budget),
            least_bytes=least,
        )
    return short_of(node, least, trial.step.budget, remedy)
