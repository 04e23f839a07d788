"""A request in, a step with places out: state and arena together keep the budget.

Where places for a plan are not found, the step is scheduled for a little less. What is
live across iterations is hardest to place: at both ends of the step it must lie beside
all else that is. So what is tried then is to have less of it.

The last resort is one step that does not depend on the budget: the one that is planned
in the least bytes, in the smallest arena that is found for it. So it is known which
budget will do where one is refused.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress

from mucudnn.errors import PlanningError
from mucudnn.ir.sizes import exact_bytes
from mucudnn.passes.placement.layout import PlacedStep
from mucudnn.passes.planning.evaluate import plan_residency
from mucudnn.passes.planning.places import (
    FRAGMENTED,
    as_planned,
    grown,
    packed,
    place,
    smallest,
    tightened,
)
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
    budget = request.budget
    if plan is None:
        try:
            plan = plan_step(request)
        except PlanningError as e:
            raise _advised(e, request) from None
    if math.isinf(budget):
        return as_planned(plan)
    target = budget
    for _ in range(_SEARCHES):
        found = _settled(request, plan) or packed(request, plan)
        if found.nbytes <= budget:
            return found
        target = min(target, plan.peak_bytes) - (found.nbytes - budget)
        try:
            plan = plan_step(request.within(max(0, target)))
        except PlanningError:
            break
    others = (place(request, other) for other in _keeping_less_live(request, plan))
    fitting = [other for other in others if other is not None]
    if fitting:
        return min(fitting, key=_step_ms)
    least = _smallest(request)
    if least.nbytes <= budget:
        return grown(request, least)
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
        tried.append(smallest(asked, plan))
        if tried[-1].nbytes <= plan.budget:
            break
    return min(tried, key=lambda placed: placed.nbytes)


def _settled(request: StepRequest, plan: StepPlan) -> PlacedStep | None:
    """The fastest step with a plan's residencies that finds places, if any does.

    It is scheduled for a little less, time and again, until what the places cost is
    little; and for a little more, where intervals gave way so much that bytes are left
    over.
    """
    tolerable = (1 + _TOLERATED) * plan.prediction.step_ms
    fitting: list[PlacedStep] = []
    for cut in _CUTS:
        tried = [plan] if cut == 0.0 else list(_replanned(request, plan, cut))
        fitting += (p for t in tried if (p := place(request, t)) is not None)
        enough = any(_step_ms(placed) <= tolerable for placed in fitting)
        hurried = cut >= _FAR or len(plan.intervals) > _MANY
        if enough or not tried or (fitting and hurried):
            break
    if not fitting:
        return None
    best = _preferred(fitting)
    if best.layout.fragmentation > FRAGMENTED:
        more = _replanned(request, plan, -_UNUSED * best.layout.fragmentation)
        others = (*(place(request, p) for p in more), tightened(best))
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
