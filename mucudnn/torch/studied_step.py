"""One step of a memory study: what plans it, and what its optimizer does behind it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.passes.planning.request import StepRequest
from mucudnn.runtime.executor.tier_choice import TierChoice
from mucudnn.runtime.profiling.tier_rates import forecast_tiers
from mucudnn.torch.capture.parts import StepParts
from mucudnn.torch.capture.whole_step import CapturedStep
from mucudnn.torch.own_update_planning import OwnUpdate
from mucudnn.torch.planning import Planner
from mucudnn.torch.splitting.decide import PartedStep
from mucudnn.torch.step_plan import TorchPlan

__all__ = ["HOST", "Away", "Hint", "StudiedStep"]


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
