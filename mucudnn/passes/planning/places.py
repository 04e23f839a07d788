"""Places for a step that is planned: offsets in an arena, within a budget or the least.

What is promised is the size of the arena, not a sum: static offsets may need a little
more than the most bytes in use at once. Then copies give way, and what convolutions may
have of workspace comes last, from what the tensors leave free.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.schedule import Schedule
from mucudnn.notebook import drawn
from mucudnn.passes.liveness import ALIGNMENT
from mucudnn.passes.placement.fit_to_arena import fit_to_arena, shortest
from mucudnn.passes.placement.grow_workspaces import (
    grow_workspaces,
    with_least_workspaces,
)
from mucudnn.passes.placement.layout import Layout, lay_out
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.scheduling.costs import state_bytes
from mucudnn.passes.scheduling.step_plan import StepPlan

__all__ = [
    "FRAGMENTED",
    "PlacedStep",
    "as_planned",
    "grown",
    "packed",
    "place",
    "smallest",
    "tightened",
]

FRAGMENTED = 0.03
"""Share of what is in use at once that an arena may be larger, before less is tried."""

_WIDER = (0.0, 0.0025, 0.01, 0.04)
"""Shares that the smallest arena may be larger than what is in use at once."""


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """A planned step, and where everything is.

    Attributes:
        plan: What was decided.
        layout: Offsets in an arena.
        state_bytes: Parameters and state that never leave, beside the arena.
    """

    plan: StepPlan
    layout: Layout
    state_bytes: int

    def _repr_html_(self) -> str:
        """For notebooks."""
        return drawn("placed_step", self)

    @property
    def schedule(self) -> Schedule:
        """What is run."""
        return self.plan.schedule

    @property
    def plans(self) -> Mapping[str, ConvPlan]:
        """Convolution node -> how to run it."""
        return self.plan.plans

    @property
    def nbytes(self) -> int:
        """Device memory of the step, all of it."""
        return self.layout.nbytes + self.state_bytes


def place(request: StepRequest, plan: StepPlan) -> PlacedStep | None:
    """Places within the budget, workspaces in what they leave free if they may be."""
    resident = _resident(plan)
    arena = int(request.budget) - resident
    found = fit_to_arena(_bare(request, plan), request.profile, arena)
    return None if found is None else grown(request, PlacedStep(*found, resident))


def packed(request: StepRequest, plan: StepPlan) -> PlacedStep:
    """Places as low as they are found with nothing giving way; any number of bytes."""
    placed = as_planned(_bare(request, plan))
    return placed if placed.nbytes > request.budget else grown(request, placed)


def tightened(request: StepRequest, placed: PlacedStep) -> PlacedStep | None:
    """The same step in an arena that is hardly larger than what is in use."""
    resident = placed.state_bytes
    arena = int((1 + FRAGMENTED) * placed.layout.live_peak)
    found = fit_to_arena(placed.plan, request.profile, arena)
    return None if found is None else PlacedStep(*found, resident)


def smallest(request: StepRequest, plan: StepPlan) -> PlacedStep:
    """A step in the smallest arena that is found for it, workspaces at their least."""
    plan = _bare(request, plan)
    resident = _resident(plan)
    short = shortest(plan, request.profile)
    best = min(map(as_planned, (short, plan)), key=lambda placed: placed.nbytes)
    for share in _WIDER:
        arena = int((1 + share) * (short.peak_bytes - resident))
        arena -= arena % ALIGNMENT
        if best.layout.nbytes <= arena:
            break
        known = fit_to_arena(plan, request.profile, arena)
        if known is not None:
            return PlacedStep(*known, resident)
    return best


def as_planned(plan: StepPlan) -> PlacedStep:
    """Places as low as they are found for a plan as it is; any number of bytes."""
    return PlacedStep(plan, lay_out(plan.schedule), _resident(plan))


def grown(request: StepRequest, placed: PlacedStep) -> PlacedStep:
    """A step that has places, with workspaces in what is free if they may be."""
    if not request.grows:
        return placed
    resident = placed.state_bytes
    arena = int(request.budget) - resident
    found = grow_workspaces(placed.plan, placed.layout, request.profile, arena)
    return PlacedStep(*found, resident)


def _bare(request: StepRequest, plan: StepPlan) -> StepPlan:
    """The step with as little workspace as may be chosen."""
    return with_least_workspaces(plan, request.profile) if request.grows else plan


def _resident(plan: StepPlan) -> int:
    """Bytes of parameters and state that never leave."""
    return state_bytes(plan.schedule.graph, plan.schedule.resident)
