"""Fused where it pays: kernels are measured, and taken where they are faster.

What is decided follows from measurements alone, never from a budget: so the same step
has the same kernels, and the same bits, under every budget that they allow. Beside
eager PyTorch, kernels of Inductor's differ by rounding. A fused node has what it reads
and makes in use at once; where a budget is met, or met faster, only by the nodes one by
one, it is they that run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from mucudnn.errors import PlanningError
from mucudnn.ir.profile import Profile
from mucudnn.torch.execution.lanes import device_of
from mucudnn.torch.fusion.costs import costs_of_kernels, restricted
from mucudnn.torch.fusion.groups import Group
from mucudnn.torch.fusion.kernels import Kernel, Kernels, check_compiler
from mucudnn.torch.fusion.rewriting import fused
from mucudnn.torch.fusion.runs import Footprint, groups_of
from mucudnn.torch.lowering.lowered import Lowered
from mucudnn.torch.plan_cache.store import PlanStore
from mucudnn.torch.planning import Planner
from mucudnn.torch.step_plan import TorchPlan

__all__ = ["Fusing"]

_WORTH = 0.95
"""A kernel's time over its members' from which on it is not taken."""


@dataclass(frozen=True)
class Fusing:
    """Plans steps with fused nodes.

    Attributes:
        plans: What was measured and planned before.
        kernels: What compiles.
    """

    plans: PlanStore
    kernels: Kernels = field(default_factory=Kernels)

    def plan(self, planner: Planner, budget: float) -> tuple[Planner, TorchPlan]:
        """The faster plan, with fused nodes or without, and whose it is.

        Raises:
            PlanningError: Neither fits; says the least budget that works.
            UnsupportedError: There is no C++ compiler.
        """
        with_kernels = self.planner(planner)
        try:
            plan = with_kernels.plan(budget, self.plans)
        except PlanningError as e:
            return planner, _either(planner, budget, self.plans, e)
        if plan.plan.prediction.step_ms > sum(planner.profile.node_ms.values()):
            apart = planner.plan(budget, self.plans)
            if apart.plan.prediction.step_ms < plan.plan.prediction.step_ms:
                return planner, apart
        return with_kernels, plan

    def planner(self, planner: Planner) -> Planner:
        """The same step with every group as one node whose kernel is faster."""
        lowered, profile = planner.lowered, planner.profile
        check_compiler(device_of(lowered.layouts))
        groups, kernels = self._compiled(
            lowered, groups_of(lowered, profile.workspaces)
        )
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
        self, lowered: Lowered, groups: Sequence[Group]
    ) -> tuple[list[Group], dict[str, Kernel]]:
        """Groups that have kernels, and these by the group's name."""
        found, kernels = [], {}
        for group in groups:
            kernel = self.kernels.of(group.recipe, group.taken)
            if kernel is not None:
                found.append(group if kernel.into else group.apart())
                kernels[group.name] = kernel
        return found, kernels


def _either(
    planner: Planner, budget: float, plans: PlanStore, fused_error: PlanningError
) -> TorchPlan:
    """The plan without fused nodes.

    Raises:
        PlanningError: Of the two, the one that says the lesser budget.
    """
    try:
        return planner.plan(budget, plans)
    except PlanningError as e:
        ours, theirs = fused_error.least_bytes, e.least_bytes
        if ours is not None and theirs is not None and ours < theirs:
            raise fused_error from None
        raise


def _pays(group: Group, costs: Profile, known: Profile, footprint: Footprint) -> bool:
    """Whether a group is faster as one node, and has no more in use."""
    apart = sum(known.node_ms[name] for name in group.members)
    return costs.node_ms[group.name] < _WORTH * apart and footprint.fits(
        group, costs.workspaces.get(group.name, 0)
    )
