"""One way to schedule a step, to be tried on residencies."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mucudnn.ir.conv import ConvPlan
from mucudnn.passes.planning.evaluate import (
    Preparer,
    StepPlan,
    first_plans,
    plan_residency,
)
from mucudnn.passes.registry import name_of
from mucudnn.passes.residency import Residency, ResidencyPolicy, Step
from mucudnn.passes.scheduling.problem import Scheduler

__all__ = ["Trial"]

_REFUSE_WHAT_IS_LEAST = ("timed", "on_demand")
"""Schedulers that refuse nothing but what does not fit with the shortest stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is decided about a step before its residencies are.

    Attributes:
        step: What to plan.
        preparer: Of its graph.
        policy: Who decides about residencies; a name or a function.
        scheduler: Times the copies.
        any_scheduler: Whether another one may take its place.
        convolutions: How convolutions get their workspace.
        plans: Convolution node -> plan, if they are fixed.
    """

    step: Step
    preparer: Preparer
    policy: str | ResidencyPolicy
    scheduler: str | Scheduler = "timed"
    any_scheduler: bool = False
    convolutions: str = "dynamic"
    plans: Mapping[str, ConvPlan] | None = None

    def __call__(self, residency: Mapping[str, Residency]) -> StepPlan:
        """Schedule residencies.

        Raises:
            PlanningError: They do not fit the budget.
        """
        return plan_residency(
            self.step.graph,
            self.step.profile,
            residency,
            budget=self.step.budget,
            scheduler=self.scheduler,
            convolutions=self.convolutions,
            plans=self.plans,
            policy=name_of(self.policy),
            preparer=self.preparer,
        )

    def check(self, residency: Mapping[str, Residency]) -> None:
        """Refuse what cannot be scheduled; takes less time than scheduling.

        Raises:
            PlanningError: The residencies do not fit the budget.
        """
        if self.scheduler not in _REFUSE_WHAT_IS_LEAST:
            self(residency)
            return
        ready = self.preparer(residency)
        plans = first_plans(ready.profile, self.convolutions, self.plans)
        ready.problem(plans, self.step.budget).least()

    def within(self, budget: float) -> "Trial":
        """The same under another budget."""
        return replace(self, step=replace(self.step, budget=budget))
