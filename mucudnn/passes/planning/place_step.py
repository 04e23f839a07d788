"""A request in, a step with places out: state and arena together keep the budget.

Where places for a plan are not found, the step is scheduled for a little less. What is
live across iterations is hardest to place: at both ends of the step it must lie beside
all else that is. So what is tried then is to have less of it.

The last resort is one step that does not depend on the budget: the one that is planned
in the least bytes, in the smallest arena that is found for it. So it is known which
budget will do where one is refused.

What is promised is the size of the arena, not a sum: static offsets may need a little
more than the most bytes in use at once. Then copies give way, and what convolutions may
have of workspace comes last, from what the tensors leave free.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from mucudnn.errors import PlanningError
from mucudnn.ir.placement import VIRTUAL
from mucudnn.ir.sizes import exact_bytes
from mucudnn.passes.liveness import ALIGNMENT, rounded
from mucudnn.passes.placement.fit_to_arena import fit_to_arena, shortest
from mucudnn.passes.placement.grow_workspaces import (
    grow_workspaces,
    with_least_workspaces,
)
from mucudnn.passes.placement.layout import PlacedStep, lay_out
from mucudnn.passes.placement.place_virtually import place_virtually
from mucudnn.passes.planning.evaluate import plan_residency
from mucudnn.passes.planning.plan_step import (
    PLANNED,
    VDNN_DYN,
    plan_of_least,
    plan_step,
)
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.scheduling import SCHEDULERS, Scheduler
from mucudnn.passes.scheduling.intervals import short_of
from mucudnn.passes.scheduling.step_plan import StepPlan

__all__ = ["PlacedStep", "place_step"]

_FRAGMENTED = 0.03
"""Share of what is in use at once that an arena may be larger, before less is tried."""

_WIDER = (0.0, 0.0025, 0.01, 0.04)
"""Shares that the smallest arena may be larger than what is in use at once."""

_SEARCHES = 4
_CUTS = (0.0, 0.01, 0.02, 0.04, 0.08)
"""Shares of the budget that a step may be scheduled below it, to find places."""

_MANY = 5000
"""Residency intervals from which on the first places that are found are good enough."""

_FAR = 0.02
"""The share below which the first places that are found are good enough."""

_UNUSED = 0.75
"""Share of the bytes that are left over, that a schedule may count on beside all."""

_HARDLY = 0.005
"""Share of a step's time for which less waste is worth having."""

_TOLERATED = 0.02
"""What places may cost of a step's time before others are looked for."""


def place_step(request: StepRequest, plan: StepPlan | None = None) -> PlacedStep:
    """Plan a step such that its arena and its state fit a budget.

    Args:
        request: What is asked. Without a budget the step is placed as it is planned.
        plan: What `plan_step` makes of the request, if it is known.

    Raises:
        PlanningError: It cannot fit; says how many bytes short, and which budget will
            do.
    """
    if plan is None:
        try:
            plan = plan_step(request)
        except PlanningError as e:
            raise _advised(e, request) from None
    placed = _within(request, plan)
    return replace(placed, plan=replace(placed.plan, least_ms=plan.least_ms))


def _within(request: StepRequest, plan: StepPlan) -> PlacedStep:
    """Places for a plan, or for another that has them."""
    budget = request.budget
    if math.isinf(budget):
        return _least_arena(request, plan)
    target = budget
    for _ in range(_SEARCHES):
        found = _fitted(request, plan) or _packed(request, plan)
        if found.nbytes <= budget:
            return found
        target = min(target, plan.peak_bytes) - (found.nbytes - budget)
        try:
            plan = plan_step(request.within(max(0, target)))
        except PlanningError:
            break
    others = (_placed(request, other) for other in _keeping_less_live(request, plan))
    fitting = [other for other in others if other is not None]
    if fitting:
        return min(fitting, key=_step_ms)
    least = _smallest(request)
    if least.nbytes <= budget:
        return _grown(request, least)
    raise PlanningError(
        f"places for {exact_bytes(plan.peak_bytes)} could not be found within "
        f"{exact_bytes(int(budget))}; {exact_bytes(least.nbytes)} will do",
        short_by=least.nbytes - int(budget),
        least_bytes=least.nbytes,
    )


def _advised(error: PlanningError, request: StepRequest) -> PlanningError:
    """What planning refused, with a budget that will do for places as well."""
    if error.least_bytes is None or error.node is None:
        return error
    nbytes = _smallest(request).nbytes
    if nbytes <= error.least_bytes:
        return error
    remedy = f"with places for all of it {exact_bytes(nbytes)} will do"
    words = short_of(error.node, error.least_bytes, request.budget, remedy)
    return PlanningError(
        str(words),
        node=error.node,
        short_by=nbytes - int(request.budget),
        least_bytes=nbytes,
    )


def _smallest(request: StepRequest) -> PlacedStep:
    """The step that is planned in the least bytes, in the least that it is placed.

    It does not depend on the budget. Of all schedulers the one that lets intervals be
    shortest finds places most easily.

    Raises:
        PlanningError: No budget works, however large.
    """
    free = request.scheduler is None
    tried: list[PlacedStep] = []
    for asked in (request.scheduled("on_demand"), request) if free else (request,):
        plan = plan_of_least(asked)
        tried.append(_smallest_of(asked, plan))
        if tried[-1].nbytes <= plan.budget:
            break
    return min(tried, key=lambda placed: placed.nbytes)


def _fitted(request: StepRequest, plan: StepPlan) -> PlacedStep | None:
    """The fastest step with a plan's residencies that finds places, if any does.

    It is scheduled for a little less, time and again, until what the places cost is
    little; and for a little more, where intervals gave way so much that bytes are left
    over.
    """
    tolerable = (1 + _TOLERATED) * plan.prediction.step_ms
    fitting: list[PlacedStep] = []
    for cut in _CUTS:
        tried = [plan] if cut == 0.0 else list(_replanned(request, plan, cut))
        fitting += (p for t in tried if (p := _placed(request, t)) is not None)
        enough = any(_step_ms(placed) <= tolerable for placed in fitting)
        hurried = cut >= _FAR or len(plan.intervals) > _MANY
        if enough or not tried or (fitting and hurried):
            break
    if not fitting:
        return None
    best = _preferred(fitting)
    if best.layout.fragmentation > _FRAGMENTED:
        more = _replanned(request, plan, -_UNUSED * best.layout.fragmentation)
        others = (*(_placed(request, p) for p in more), _tightened(best))
        fitting += (p for p in others if p is not None)
    return _preferred(fitting)


def _replanned(request: StepRequest, plan: StepPlan, cut: float) -> Iterator[StepPlan]:
    """A plan's residencies scheduled for a share less than the budget."""
    if request.policy == VDNN_DYN:
        return
    schedulers: list[str | Scheduler] = [request.scheduler or plan.scheduler]
    if request.scheduler is None and request.policy == PLANNED:
        schedulers = list(dict.fromkeys((plan.scheduler, "timed")))
    less = request.within((1 - cut) * request.budget)
    for name in schedulers:
        with suppress(PlanningError):
            yield plan_residency(less.scheduled(name), plan.residency)


def _keeping_less_live(request: StepRequest, plan: StepPlan) -> Iterator[StepPlan]:
    """A plan's residencies with parameters and state that leave in every step.

    Only those that do already, or all of them.
    """
    if request.scheduler is not None:
        return
    these = frozenset(plan.schedule.hosted)
    homes = (these, request.persistent) if request.hosted is None else (request.hosted,)
    for home, name in itertools.product(homes, SCHEDULERS.table):
        with suppress(PlanningError):
            yield plan_residency(request.hosting(home).scheduled(name), plan.residency)


def _preferred(placed: Sequence[PlacedStep]) -> PlacedStep:
    """The fastest, or one that is hardly slower and wastes less."""
    fastest = min(map(_step_ms, placed))
    good = [p for p in placed if _step_ms(p) <= (1 + _HARDLY) * fastest]
    return min(good, key=lambda p: p.layout.fragmentation)


def _step_ms(placed: PlacedStep) -> float:
    return placed.plan.prediction.step_ms


def _placed(request: StepRequest, plan: StepPlan) -> PlacedStep | None:
    """Places within the budget, workspaces in what they leave free if they may be.

    Where they may be in pieces, nothing has to give way, or else the faster counts.
    """
    arena = int(request.budget) - plan.state_bytes
    virtual = None
    if request.placement == VIRTUAL:
        virtual = place_virtually(plan, arena, grows=request.grows)
    if virtual and _step_ms(virtual) <= (1 + _HARDLY) * plan.prediction.step_ms:
        return virtual
    found = fit_to_arena(_bare(request, plan), arena)
    static = None if found is None else _grown(request, found)
    return min(filter(None, (static, virtual)), key=_step_ms, default=None)


def _packed(request: StepRequest, plan: StepPlan) -> PlacedStep:
    """Places as low as they are found with nothing giving way; any number of bytes."""
    placed = _as_planned(_bare(request, plan))
    return placed if placed.nbytes > request.budget else _grown(request, placed)


def _tightened(placed: PlacedStep) -> PlacedStep | None:
    """The same step in an arena that is hardly larger than what is in use."""
    arena = int((1 + _FRAGMENTED) * placed.layout.live_peak)
    return fit_to_arena(placed.plan, arena)


def _smallest_of(request: StepRequest, plan: StepPlan) -> PlacedStep:
    """A step in the smallest arena that is found for it, workspaces at their least."""
    plan = _bare(request, plan)
    short = shortest(plan)
    best = min(
        (_least_arena(request, p) for p in (short, plan)), key=lambda p: p.nbytes
    )
    for share in _WIDER:
        arena = int((1 + share) * (short.peak_bytes - plan.state_bytes))
        arena -= arena % ALIGNMENT
        if best.layout.nbytes <= arena:
            break
        found = fit_to_arena(plan, arena)
        if found is not None:
            return found
    return best


def _least_arena(request: StepRequest, plan: StepPlan) -> PlacedStep:
    """A plan as it is, in the smallest arena that is found for it, mapped or not."""
    static = _as_planned(plan)
    if request.placement != VIRTUAL or plan.profile.chunks is None:
        return static
    size, arena = plan.profile.chunks.nbytes, plan.peak_bytes - plan.state_bytes
    for share in _WIDER:
        nbytes = rounded(int((1 + share) * arena), size)
        found = place_virtually(plan, nbytes) if nbytes < static.layout.nbytes else None
        if found is not None:
            return found
    return static


def _as_planned(plan: StepPlan) -> PlacedStep:
    """Places as low as they are found for a plan as it is; any number of bytes."""
    return PlacedStep(plan, lay_out(plan.schedule))


def _grown(request: StepRequest, placed: PlacedStep) -> PlacedStep:
    """A step that has places, with workspaces in what is free if they may be."""
    if not request.grows:
        return placed
    return grow_workspaces(placed, int(request.budget) - placed.state_bytes)


def _bare(request: StepRequest, plan: StepPlan) -> StepPlan:
    """The step with as little workspace as may be chosen."""
    return with_least_workspaces(plan) if request.grows else plan
