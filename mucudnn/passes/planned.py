"""A budget in, a plan out: every policy by its name.

Most policies choose residencies; what else there is to decide follows. Some decide the
convolutions' plans as well: those are functions of a trial.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import format_bytes
from mucudnn.passes.residency import POLICIES, Step
from mucudnn.passes.search import minimum_budget, search
from mucudnn.passes.step_plan import Preparer, StepPlan
from mucudnn.passes.trial import Trial
from mucudnn.passes.vdnn_dyn import vdnn_dyn
from mucudnn.passes.window import Scheduler

__all__ = [
    "PLANNED",
    "STEP_PLANNERS",
    "VDNN_DYN",
    "minimum_budget",
    "plan_step",
    "policy_names",
]

PLANNED = "planned"
"""The policy that is a search over the others and beyond."""

VDNN_DYN = "vdnn_dyn"
"""The policy that takes the first of vDNN's configurations that fits."""

STEP_PLANNERS: Mapping[str, Callable[[Trial], StepPlan]] = MappingProxyType(
    {PLANNED: search, VDNN_DYN: vdnn_dyn}
)
"""Policies that decide more than residencies."""


def policy_names() -> tuple[str, ...]:
    """What `plan_step` takes as a policy."""
    return (*STEP_PLANNERS, *POLICIES.table)


def plan_step(
    graph: Graph,
    profile: Profile,
    *,
    budget: float,
    policy: str = PLANNED,
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
        policy: One of `policy_names`.
        scheduler: Times the copies; if not given, `on_demand` for vDNN's dynamic
            policy, any for the search, else `timed`.
        convolutions: How convolutions get their workspace.
        plans: Convolution node -> plan, if they are fixed.
        hosted: Parameters and state whose home is the host, and no others, if that is
            decided: by another step that shares them.

    Raises:
        PlanningError: It cannot fit; says how many bytes short, at which node, and the
            least budget that works.
        ValueError: A name is not known.
    """
    default = "on_demand" if policy == VDNN_DYN else "timed"
    step = Step(graph, profile, budget, hosted)
    trial = Trial(
        step=step,
        preparer=Preparer(graph, profile, hosted),
        policy=policy,
        scheduler=default if scheduler is None else scheduler,
        any_scheduler=scheduler is None,
        convolutions=convolutions,
        plans=plans,
    )
    if policy not in (*STEP_PLANNERS, *POLICIES.table):
        valid = ", ".join(sorted(policy_names()))
        raise ValueError(f"unknown policy {policy!r}; choose one of: {valid}")
    try:
        if policy in STEP_PLANNERS:
            return STEP_PLANNERS[policy](trial)
        return trial(POLICIES.resolve(policy)(step))
    except PlanningError as e:
        least = minimum_budget(graph, profile, hosted=hosted)
        raise PlanningError(
            f"{e}; the least budget that works is {format_bytes(least)} ({least} bytes)"
        ) from None
