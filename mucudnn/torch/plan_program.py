"""From a captured step to a plan within a budget, and a program that keeps it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from mucudnn.ir.graph import Graph, Phase
from mucudnn.ir.profile import Profile
from mucudnn.passes.planning.cutting import WHOLE, Split, check_split
from mucudnn.passes.planning.request import StepRequest
from mucudnn.runtime.executor.tiers import TierChoice
from mucudnn.runtime.profiling.links import forecast_tiers
from mucudnn.torch.capture.optimizers import with_updates
from mucudnn.torch.capture.step import CapturedStep
from mucudnn.torch.capture.step_tensors import StepParts
from mucudnn.torch.conv.fronts import ConvolutionChoice
from mucudnn.torch.costs.measure import measured
from mucudnn.torch.execution.bound_step import BoundStep, bind_step
from mucudnn.torch.execution.devices import device_of
from mucudnn.torch.execution.tiers import StepTiers
from mucudnn.torch.lowering.lower import lower
from mucudnn.torch.lowering.lowered import Lowered
from mucudnn.torch.optimizer_update import OwnUpdate
from mucudnn.torch.plan import TorchPlan
from mucudnn.torch.plan_store import PlanStore
from mucudnn.torch.planning import Planner
from mucudnn.torch.splitting.plan import PartedStep, plan_in_parts

if TYPE_CHECKING:
    from mucudnn.torch.fusion.fusing import Fusing


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


# One step of a memory study: what plans it, and what its optimizer does behind it.


@dataclass(frozen=True)
class Away:
    """What may leave a device, and where to; no tiers mean the host's memory."""

    tiers: tuple[TierChoice, ...] = ()
    state: bool = False

    def planner(self, planner: Planner, *, measured: bool) -> Planner:
        """A planner that lets it leave, over measured or published links."""
        tiers = forecast_tiers(self.tiers, planner.profile, measured=measured)
        return replace(planner, offload=self.state, tiers=tiers)


HOST = Away()
"""The host's memory; parameters and state stay."""


@dataclass(frozen=True)
class StudiedStep:
    """A step without data, under any budget.

    Attributes:
        planner: Of the step, or of its passes where the optimizer makes its update
            itself.
        captured: As it was recorded.
        parts: What it is made of.
        update: What the optimizer does behind the passes; None if that is recorded.
        parted: The step where it may run in parts; None if it runs whole.
    """

    planner: Planner
    captured: CapturedStep
    parts: StepParts
    update: OwnUpdate | None = None
    parted: PartedStep | None = None

    def plan(self, budget: float = math.inf) -> TorchPlan:
        """The step within a budget, as `train_step` plans it.

        Raises:
            PlanningError: It does not fit; says the least budget that works.
        """
        passes = self.parted or self.planner
        if self.update is None:
            return passes.plan(budget)
        found, _ = self.update.planned(
            self.captured, self.parts, budget, lambda b: (passes.plan(b), None)
        )
        return found

    def least_budget(self) -> int:
        """The least bytes that the step is planned in."""
        least = (self.parted or self.planner).least_budget()
        if self.update is None:
            return least
        behind = self.update.peak_bytes(self.captured, self.parts)
        return max(least + self.update.bytes.held, behind)

    @property
    def whole(self) -> "StudiedStep":
        """The step where it may not run in parts."""
        return replace(self, parted=None)

    def at_costs(self, costs: Callable[[Profile], Profile]) -> "StudiedStep":
        """The whole step at other costs."""
        planner = replace(self.planner, profile=costs(self.planner.profile))
        return replace(self.whole, planner=planner)

    def request(self) -> StepRequest:
        """What a planner is asked, the caller's tensors without bytes."""
        planner = self.planner
        graph = planner.lowered.graph
        given = {graph.storages[name] for name in planner.given}
        tensors = {
            name: replace(spec, shape=(0,)) if graph.storages[name] in given else spec
            for name, spec in graph.tensors.items()
        }
        bare = Graph(MappingProxyType(tensors), graph.nodes, graph.outputs)
        profile = planner.profile
        if self.update is not None:
            behind = self.update.behind(bare, profile, self.captured, self.parts)
            bare, profile = behind
        return replace(planner.request(), graph=bare, profile=profile, budget=math.inf)


@dataclass(frozen=True)
class Hint:
    """A plan, and what it is about in PyTorch's words.

    Attributes:
        planner: Of the step.
        plan: Within a budget.
        module: The step as PyTorch's operations.
        forward: Those of its nodes that are of the forward pass.
    """

    planner: Planner
    plan: TorchPlan
    module: torch.fx.GraphModule
    forward: frozenset[str]
