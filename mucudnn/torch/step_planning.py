"""From a captured step to a plan within a budget, and a program that keeps it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from mucudnn.ir.graph import Phase
from mucudnn.ir.profile import Profile
from mucudnn.passes.planning.splitting.cutting import WHOLE, Split, check_split
from mucudnn.torch.capture.parts import StepParts
from mucudnn.torch.capture.updates import with_updates
from mucudnn.torch.capture.whole_step import CapturedStep
from mucudnn.torch.conv.fronts import ConvolutionChoice
from mucudnn.torch.execution.bound_step import BoundStep, bind_step
from mucudnn.torch.execution.lanes import device_of
from mucudnn.torch.execution.tiers import StepTiers
from mucudnn.torch.lowering.lower import lower
from mucudnn.torch.lowering.lowered import Lowered
from mucudnn.torch.measure import measured
from mucudnn.torch.own_update_planning import OwnUpdate
from mucudnn.torch.plan_cache.store import PlanStore
from mucudnn.torch.planning import Planner
from mucudnn.torch.splitting.decide import plan_in_parts
from mucudnn.torch.step_plan import TorchPlan

if TYPE_CHECKING:  # which imports Inductor
    from mucudnn.torch.fusion.fusing import Fusing

__all__ = ["StepPlanning", "lowered_step", "planner_of"]


def lowered_step(captured: CapturedStep) -> Lowered:
    """The graph of a captured step, what it changes for good changed in place."""

    def phase_of(node: str) -> Phase:
        if node in captured.forward:
            return Phase.FORWARD
        return Phase.BACKWARD if node in captured.backward else Phase.UPDATE

    return lower(captured.module, phase_of)


def planner_of(
    captured: CapturedStep,
    parts: StepParts,
    profiled: Callable[[Lowered], Profile],
    plain: Lowered | None = None,
) -> Planner:
    """What plans a captured step.

    Args:
        captured: The step.
        parts: What it is made of.
        profiled: What measures or estimates it.
        plain: Its graph, if it is not the captured one as it is.
    """
    plain = lowered_step(captured) if plain is None else plain
    of_name = dict(zip(captured.names, plain.inputs, strict=True))
    late = frozenset(t for name in parts.buffers if (t := of_name[name]) is not None)
    lowered = with_updates(plain, late)
    given = [t for n, t in of_name.items() if t is not None and n.startswith("batch.")]
    return Planner(lowered, profiled(lowered), given)


@dataclass(frozen=True)
class StepPlanning:
    """How steps are planned.

    Attributes:
        budget: Bytes for everything but the batch.
        costs: What tells times and scratch memory of a graph's nodes.
        plans: What was measured and planned before.
        offload_state: Whether parameters and state may be host-resident.
        choice: Whether convolutions may be run in other ways than PyTorch's.
        split: Whether the step runs in slices of its batch, or strips of its images.
        fusing: Makes kernels of several operations, if they are wanted.
        tiers: Where to what leaves goes; None means the host's memory.

    Raises:
        ValueError: The split is none, or is wanted with kernels of several operations.
    """

    budget: float
    costs: Callable[[Lowered], Profile] = measured
    plans: PlanStore = field(default_factory=PlanStore)
    offload_state: bool = False
    choice: ConvolutionChoice = field(default_factory=ConvolutionChoice)
    split: Split = WHOLE
    fusing: "Fusing | None" = None
    tiers: StepTiers | None = None

    def __post_init__(self) -> None:
        check_split(self.split)
        if self.fusing is not None and self.split != WHOLE:
            raise ValueError(
                f"split={self.split!r} and inductor=True: kernels of several "
                "operations are made for whole steps so far; take one of both"
            )

    def plan(
        self,
        captured: CapturedStep,
        parts: StepParts,
        update: OwnUpdate | None = None,
    ) -> tuple[TorchPlan, BoundStep]:
        """A captured step within the budget, and what runs it.

        Args:
            captured: The step.
            parts: What it is made of.
            update: What the optimizer does behind it, if it is not part of it.

        Raises:
            PlanningError: It does not fit; says the least budget that works.
            UnsupportedError: It cannot be measured; says why.
            OutOfMemoryError: There is no room for what leaves.
        """
        if update is None:
            return self._planned(captured, parts, self.budget)
        return update.planned(
            captured, parts, self.budget, partial(self._planned, captured, parts)
        )

    def _planned(
        self, captured: CapturedStep, parts: StepParts, budget: float
    ) -> tuple[TorchPlan, BoundStep]:
        def make(lowered: Lowered) -> Planner:
            planner = planner_of(captured, parts, self._profile, lowered)
            device = device_of(planner.lowered.layouts)
            tiers = self.tiers.measured(device) if self.tiers else ()
            return replace(planner, offload=self.offload_state, tiers=tiers)

        lowered = lowered_step(captured)
        if self.split != WHOLE:
            names = captured.names
            planner, plan = plan_in_parts(lowered, names, make, budget, self.split)
        elif self.fusing is None:
            planner = make(lowered)
            plan = planner.plan(budget, self.plans)
        else:
            whole = make(lowered)
            planner, plan = self.fusing.plan(whole, budget, self.plans)
        chosen = self.choice.bound(planner.lowered, plan.plan)
        copies = self.tiers.copies(plan.plan) if self.tiers else None
        bound = bind_step(chosen, plan.plan.schedule, copies)
        return replace(plan, source=bound.source), bound

    def _profile(self, lowered: Lowered) -> Profile:
        return self.choice.profile(lowered, self.costs, self.plans)
