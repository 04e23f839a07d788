"""Plan steps with fused nodes, where their kernels are measured to be faster.

Kernels are chosen by measurements alone, never by a budget: the same step has the same
kernels, and the same bits, under every budget that allows them. Inductor's kernels
differ from eager PyTorch by rounding. A fused node has all its inputs and outputs in
use at once; where a budget needs the unfused nodes, or is met faster by them, they run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from mucudnn.errors import PlanningError
from mucudnn.ir.profile import Profile
from mucudnn.torch.execution.devices import device_of
from mucudnn.torch.fusion.costs import costs_of_kernels, restricted
from mucudnn.torch.fusion.groups import Group
from mucudnn.torch.fusion.kernels import Kernel, Kernels, check_compiler
from mucudnn.torch.fusion.rewriting import fused
from mucudnn.torch.fusion.runs import Footprint, groups_of
from mucudnn.torch.plan import TorchPlan
from mucudnn.torch.plan_store import PlanStore
from mucudnn.torch.planning import Planner

_WORTH = 0.95
"""Largest share of its members' time that a kernel may take."""

_SMALLEST = 5e-4
"""Least share of the step's time that a recipe has to take to be compiled."""


@dataclass(frozen=True)
class Fusing:
    """Plans steps with fused nodes.

    Attributes:
        plans: Remembered measurements.
        kernels: Compiles kernels.
    """

    plans: PlanStore
    kernels: Kernels = field(default_factory=Kernels)

    def plan(
        self, planner: Planner, budget: float, plans: PlanStore | None
    ) -> tuple[Planner, TorchPlan]:
        """Return the faster plan, with fused nodes or without, and its planner.

        Args:
            planner: Of the step without fused nodes.
            budget: Bytes.
            plans: Remembered plans; None plans anew.

        Raises:
            PlanningError: Neither fits; says the least budget that works.
            UnsupportedError: There is no C++ compiler.
        """
        with_kernels = self.planner(planner)
        try:
            plan = with_kernels.plan(budget, plans)
        except PlanningError as e:
            return planner, _either(planner, budget, plans, e)
        if plan.plan.prediction.step_ms > sum(planner.profile.node_ms.values()):
            apart = planner.plan(budget, plans)
            if apart.plan.prediction.step_ms < plan.plan.prediction.step_ms:
                return planner, apart
        known = planner.lowered.calls
        count = sum(name not in known for name in with_kernels.lowered.calls)
        return with_kernels, replace(plan, kernels=count)

    def planner(self, planner: Planner) -> Planner:
        """Return the same step with every group fused whose kernel is faster."""
        lowered, profile = planner.lowered, planner.profile
        check_compiler(device_of(lowered.layouts))
        worthy = _worthy(groups_of(lowered, profile.workspaces), profile)
        groups, kernels = self._compiled(worthy)
        if not groups:
            return planner
        trial = fused(lowered, groups, kernels)
        costs = self.plans.profile(
            trial, partial(costs_of_kernels, profile), "inductor"
        )
        footprint = Footprint(lowered, profile.workspaces)
        taken = [g for g in groups if _pays(g, costs, profile, footprint)]
        found = fused(lowered, taken, kernels)
        return replace(
            planner, lowered=found, profile=restricted(found, profile, costs)
        )

    def _compiled(
        self, groups: Sequence[Group]
    ) -> tuple[list[Group], dict[str, Kernel]]:
        """Compile kernels; return the groups that have one, and kernels by name."""
        found, kernels = [], {}
        for group in groups:
            kernel = self.kernels.of(group.recipe, group.taken)
            if kernel is not None:
                found.append(group if kernel.into else group.without_overwriting())
                kernels[group.name] = kernel
        return found, kernels


def _either(
    planner: Planner, budget: float, plans: PlanStore | None, fused_error: PlanningError
) -> TorchPlan:
    """Return the plan without fused nodes.

    Raises:
        PlanningError: It does not fit, either; says the lesser of both least budgets.
    """
    try:
        return planner.plan(budget, plans)
    except PlanningError as e:
        ours, theirs = fused_error.least_bytes, e.least_bytes
        if ours is not None and theirs is not None and ours < theirs:
            raise fused_error from None
        raise


def _worthy(groups: Sequence[Group], known: Profile) -> list[Group]:
    """Return the groups whose recipe, in all its uses, takes a share of the step."""
    times: dict[str, float] = {}
    for group in groups:
        recipe = group.recipe.digest
        apart = sum(known.node_ms[name] for name in group.members)
        times[recipe] = times.get(recipe, 0) + apart
    least = _SMALLEST * sum(known.node_ms.values())
    return [group for group in groups if times[group.recipe.digest] >= least]


def _pays(group: Group, costs: Profile, known: Profile, footprint: Footprint) -> bool:
    """Return whether a group is faster as one node, and has no more bytes in use."""
    apart = sum(known.node_ms[name] for name in group.members)
    return costs.node_ms[group.name] < _WORTH * apart and footprint.fits(
        group, costs.workspaces.get(group.name, 0)
    )
