"""Places for a step that is planned: offsets in an arena, within a budget or the least.

What is promised is the size of the arena, not a sum: static offsets may need a little
more than the most bytes in use at once. Then copies give way, and what convolutions may
have of workspace comes last, from what the tensors leave free.
"""

from mucudnn.passes.liveness import ALIGNMENT
from mucudnn.passes.placement.fit_to_arena import fit_to_arena, shortest
from mucudnn.passes.placement.grow_workspaces import (
    grow_workspaces,
    with_least_workspaces,
)
from mucudnn.passes.placement.layout import PlacedStep, lay_out
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.scheduling.step_plan import StepPlan

__all__ = [
    "FRAGMENTED",
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


def place(request: StepRequest, plan: StepPlan) -> PlacedStep | None:
    """Places within the budget, workspaces in what they leave free if they may be."""
    arena = int(request.budget) - plan.state_bytes
    found = fit_to_arena(_bare(request, plan), arena)
    return None if found is None else grown(request, found)


def packed(request: StepRequest, plan: StepPlan) -> PlacedStep:
    """Places as low as they are found with nothing giving way; any number of bytes."""
    placed = as_planned(_bare(request, plan))
    return placed if placed.nbytes > request.budget else grown(request, placed)


def tightened(placed: PlacedStep) -> PlacedStep | None:
    """The same step in an arena that is hardly larger than what is in use."""
    arena = int((1 + FRAGMENTED) * placed.layout.live_peak)
    return fit_to_arena(placed.plan, arena)


def smallest(request: StepRequest, plan: StepPlan) -> PlacedStep:
    """A step in the smallest arena that is found for it, workspaces at their least."""
    plan = _bare(request, plan)
    short = shortest(plan)
    best = min(map(as_planned, (short, plan)), key=lambda placed: placed.nbytes)
    for share in _WIDER:
        arena = int((1 + share) * (short.peak_bytes - plan.state_bytes))
        arena -= arena % ALIGNMENT
        if best.layout.nbytes <= arena:
            break
        found = fit_to_arena(plan, arena)
        if found is not None:
            return found
    return best


def as_planned(plan: StepPlan) -> PlacedStep:
    """Places as low as they are found for a plan as it is; any number of bytes."""
    return PlacedStep(plan, lay_out(plan.schedule))


def grown(request: StepRequest, placed: PlacedStep) -> PlacedStep:
    """A step that has places, with workspaces in what is free if they may be."""
    if not request.grows:
        return placed
    return grow_workspaces(placed, int(request.budget) - placed.state_bytes)


def _bare(request: StepRequest, plan: StepPlan) -> StepPlan:
    """The step with as little workspace as may be chosen."""
    return with_least_workspaces(plan) if request.grows else plan
