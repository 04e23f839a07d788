"""Plan and place a step: state and arena together stay within the budget.

The guarantee is the size of the arena, not the peak of bytes in use: static offsets may
need a little more because of fragmentation. Then residency intervals shrink (copies are
delayed), and convolutions get their workspaces last, from the remaining gaps.

If a plan cannot be placed, the step is scheduled for slightly less than the budget. If
placement makes it slower, the search plans again for less: its other plans are easier
to place, and sometimes even faster.
Tensors that are live across steps are hardest to place, as they have the same offset at
both ends of the step; so plans that offload more parameters and state are tried next.
The last resort does not depend on the budget: the plan of the minimum feasible budget,
in the smallest arena found for it. Its size is the budget that errors recommend.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from mucudnn.errors import PlanningError
from mucudnn.ir.profile import MemoryTier, TierPlacement
from mucudnn.ir.schedule import STATIC, VIRTUAL
from mucudnn.ir.sizes import exact_bytes
from mucudnn.passes.liveness import ALIGNMENT, rounded
from mucudnn.passes.placement.fit_to_arena import (
    fit_to_arena,
    grow_workspaces,
    shortest,
    with_least_workspaces,
)
from mucudnn.passes.placement.layout import Layout, PlacedStep, lay_out
from mucudnn.passes.placement.paging import place_virtually
from mucudnn.passes.placement.tiers import fill_tiers, place_state
from mucudnn.passes.planning.plan_step import minimum_budget, plan_of_least, plan_step
from mucudnn.passes.planning.request import StepRequest, plan_residency
from mucudnn.passes.residency import PLANNED, VDNN_DYN
from mucudnn.passes.scheduling import SCHEDULERS, Scheduler
from mucudnn.passes.scheduling.intervals import budget_error
from mucudnn.passes.scheduling.step_plan import StepPlan

_FRAGMENTED = 0.03
"""Fragmentation above which further placements are tried."""

_WIDER = (0.0, 0.0025, 0.01, 0.04)
"""Fragmentations to try, ascending, for the smallest arena."""

_SEARCHES = 4

_CUTS = (0.0, 0.01, 0.02, 0.04, 0.08)
"""Fractions of the budget by which a step is scheduled below it to be placed."""

_REPLANNED = 0.04
"""Fraction of the budget by which a step that placement slows down is planned again
below it."""

_LOST = 0.015
"""Relative slowdown by placement from which a step is planned again."""

_MANY = 5000
"""Residency intervals above which the first placement found is used."""

_FAR = 0.02
"""Fraction below the budget from which the first placement found is used."""

_UNUSED = 0.75
"""Fraction of the unused bytes that a new schedule may use in addition."""

_HARDLY = 0.005
"""Relative slowdown accepted for less fragmentation."""

_TOLERATED = 0.02
"""Relative slowdown by placement at which the search stops."""


def place_step(request: StepRequest, plan: StepPlan | None = None) -> PlacedStep:
    """Plan a step such that its arena and its resident state fit a budget.

    Args:
        request: The planning request. Without a budget the step is placed as planned.
        plan: Result of `plan_step` for the request, if known.

    Raises:
        PlanningError: The step cannot fit; has the shortfall and a sufficient budget.
    """
    if plan is None:
        try:
            plan = plan_step(request)
        except PlanningError as e:
            raise _advised(e, request) from None
    placed = _place_within(request, plan)
    if request.placement == VIRTUAL:
        with suppress(PlanningError):
            static = _place_within(replace(request, placement=STATIC), plan)
            placed = min(placed, static, key=_step_ms)
    return replace(placed, plan=replace(placed.plan, least_ms=plan.least_ms))


def placeable_budget(request: StepRequest) -> int:
    """Return the least budget in which `place_step` is sure to place a step.

    The request's budget is ignored. Less may do by chance, but not less than
    `minimum_budget`.
    """
    return max(minimum_budget(request), _smallest(request).nbytes)


def fits_resident(request: StepRequest) -> bool:
    """Return whether all tensors fit the budget, with the least workspaces."""
    if math.isinf(request.budget):
        return True
    kept = replace(
        request,
        budget=math.inf,
        policy="keep_all",
        scheduler=None,
        convolutions="least",
        plans=None,
        placement=STATIC,
    )
    return place_step(kept).nbytes <= request.budget


def _place_within(request: StepRequest, plan: StepPlan) -> PlacedStep:
    """Place a plan within the budget, or another plan that can be placed."""
    budget = request.budget
    if math.isinf(budget):
        return _least_arena(request, plan)
    # 1. This plan, then plans for as much less as its layout exceeds the budget.
    target = budget
    for _ in range(_SEARCHES):
        found = _place_with_shrinking(request, plan) or _place_unshrunk(request, plan)
        if found.nbytes <= budget:
            return _replanned_for_less(request, plan, found)
        target = min(target, plan.peak_bytes) - (found.nbytes - budget)
        try:
            plan = plan_step(request.within(max(0, target)))
        except PlanningError:
            break
    # 2. The same residencies with more parameters and state on the host.
    others = (_placed(request, other) for other in _with_more_offload(request, plan))
    fitting = [other for other in others if other is not None]
    if fitting:
        return min(fitting, key=_step_ms)
    # 3. The plan of the minimum feasible budget, whatever its speed.
    least = _smallest(request)
    if least.nbytes <= budget:
        return _with_grown_workspaces(request, least)
    raise PlanningError(
        f"no placement for {exact_bytes(plan.peak_bytes)} was found within "
        f"{exact_bytes(int(budget))}; {exact_bytes(least.nbytes)} is enough",
        short_by=least.nbytes - int(budget),
        least_bytes=least.nbytes,
    )


def _advised(error: PlanningError, request: StepRequest) -> PlanningError:
    """Return a planning error with a budget that is sufficient for placement, too."""
    if error.least_bytes is None or error.node is None:
        return error
    nbytes = _smallest(request).nbytes
    if nbytes <= error.least_bytes:
        return error
    remedy = f"with places for all tensors {exact_bytes(nbytes)} is enough"
    words = budget_error(error.node, error.least_bytes, request.budget, remedy)
    return PlanningError(
        str(words),
        node=error.node,
        short_by=nbytes - int(request.budget),
        least_bytes=nbytes,
    )


def _smallest(request: StepRequest) -> PlacedStep:
    """Return the plan of the minimum feasible budget in the smallest arena found.

    The result does not depend on the budget. The scheduler with the shortest intervals
    is tried first, as they are the easiest to place.
    """
    free = request.scheduler is None
    tried: list[PlacedStep] = []
    for asked in (request.scheduled("on_demand"), request) if free else (request,):
        plan = plan_of_least(asked)
        tried.append(_smallest_of(asked, plan))
        if tried[-1].nbytes <= plan.budget:
            break
    return min(tried, key=lambda placed: placed.nbytes)


def _place_with_shrinking(request: StepRequest, plan: StepPlan) -> PlacedStep | None:
    """Return the fastest placed step with a plan's residencies, or None.

    The step is scheduled for less and less until the slowdown by placement is small,
    and for more if shrunk intervals leave bytes unused.
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
        tight = fit_to_arena(best.plan, int((1 + _FRAGMENTED) * best.layout.live_peak))
        others = (*(_placed(request, p) for p in more), tight)
        fitting += (p for p in others if p is not None)
    return _preferred(fitting)


def _replanned_for_less(
    request: StepRequest, plan: StepPlan, placed: PlacedStep
) -> PlacedStep:
    """Return a placed step, or a faster one whose search had less memory.

    Nothing is searched again unless placement made the plan slower.
    """
    if request.policy != PLANNED:
        return placed
    if _step_ms(placed) <= (1 + _LOST) * plan.prediction.step_ms:
        return placed
    with suppress(PlanningError):
        less = plan_step(request.within(int((1 - _REPLANNED) * request.budget)))
        if less.prediction.step_ms < _step_ms(placed):
            others = filter(None, (placed, _placed(request, less)))
            return min(others, key=_step_ms)
    return placed


def _replanned(request: StepRequest, plan: StepPlan, cut: float) -> Iterator[StepPlan]:
    """Yield schedules of a plan's residencies for a fraction below the budget."""
    if request.policy == VDNN_DYN:
        return
    schedulers: list[str | Scheduler] = [request.scheduler or plan.scheduler]
    if request.scheduler is None and request.policy == PLANNED:
        schedulers = list(dict.fromkeys((plan.scheduler, "timed")))
    less = request.within((1 - cut) * request.budget)
    for name in schedulers:
        with suppress(PlanningError):
            yield plan_residency(less.scheduled(name), plan.residency)


def _with_more_offload(request: StepRequest, plan: StepPlan) -> Iterator[StepPlan]:
    """Yield schedules of a plan's residencies with host-resident state.

    Host-resident are the tensors that are already, or all parameters and state.
    """
    if request.scheduler is not None:
        return
    these = frozenset(plan.schedule.hosted)
    host_resident_sets = (
        (these, request.persistent) if request.hosted is None else (request.hosted,)
    )
    for host_resident, name in itertools.product(host_resident_sets, SCHEDULERS.table):
        with suppress(PlanningError):
            yield plan_residency(
                request.hosting(host_resident).scheduled(name), plan.residency
            )


def _preferred(placed: Sequence[PlacedStep]) -> PlacedStep:
    """Return the least fragmented of the steps that are about as fast as the best."""
    fastest = min(map(_step_ms, placed))
    good = [p for p in placed if _step_ms(p) <= (1 + _HARDLY) * fastest]
    return min(good, key=lambda p: p.layout.fragmentation)


def _step_ms(placed: PlacedStep) -> float:
    return placed.plan.prediction.step_ms


def _placed(request: StepRequest, plan: StepPlan) -> PlacedStep | None:
    """Place a plan within the budget; return None if it cannot be placed.

    With virtual placement, intervals shrink only if that is faster.
    """
    arena = int(request.budget) - plan.state_bytes
    virtual = None
    if request.placement == VIRTUAL:
        virtual = place_virtually(plan, arena, grows=request.grows)
    if virtual and _step_ms(virtual) <= (1 + _HARDLY) * plan.prediction.step_ms:
        return virtual
    # Workspaces get the gaps that tensors leave. Where these are too small for the
    # planned ones, workspaces are placed like tensors.
    tried = [virtual]
    for grows in (True, False) if request.grows else (False,):
        if (found := fit_to_arena(plan, arena, grows=grows)) is not None:
            static = _with_grown_workspaces(request, found)
            tried.append(static)
            if _step_ms(static) <= (1 + _HARDLY) * plan.prediction.step_ms:
                break
    return min(filter(None, tried), key=_step_ms, default=None)


def _place_unshrunk(request: StepRequest, plan: StepPlan) -> PlacedStep:
    """Place a plan without shrinking intervals, in an arena of any size."""
    minimal = _with_minimal_workspaces(request, plan)
    placed = PlacedStep(minimal, lay_out(minimal.schedule))
    return (
        placed
        if placed.nbytes > request.budget
        else _with_grown_workspaces(request, placed)
    )


def _smallest_of(request: StepRequest, plan: StepPlan) -> PlacedStep:
    """Place a step with minimal workspaces in the smallest arena found."""
    plan = _with_minimal_workspaces(request, plan)
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
    """Place a plan without shrinking intervals in the smallest arena found."""
    static = PlacedStep(plan, lay_out(plan.schedule))
    if request.placement != VIRTUAL or plan.profile.mapping_costs is None:
        return static
    size, arena = plan.profile.mapping_costs.nbytes, plan.peak_bytes - plan.state_bytes
    for share in _WIDER:
        nbytes = rounded(int((1 + share) * arena), size)
        found = place_virtually(plan, nbytes) if nbytes < static.layout.nbytes else None
        if found is not None:
            return found
    return static


def _with_grown_workspaces(request: StepRequest, placed: PlacedStep) -> PlacedStep:
    if not request.grows:
        return placed
    return grow_workspaces(placed, int(request.budget) - placed.state_bytes)


def _with_minimal_workspaces(request: StepRequest, plan: StepPlan) -> StepPlan:
    return with_least_workspaces(plan) if request.grows else plan


# Plan a step that offloads to several memory tiers, each with links of its own.
#
# Residencies are decided at the link rates of one tier, while tiers differ in speed and
# size. The step is therefore planned at the rates of each tier, storages are assigned
# to tiers, and the fastest simulated plan is chosen. If the tiers have too little room,
# the step is planned for slower links, which favours recomputation.


LayoutT = TypeVar("LayoutT")

_SLOWER = (4.0, 16.0, 64.0)
"""Factors by which links are slowed down if the tiers have too little room."""


def place_tiered_step(
    request: StepRequest,
    tiers: Sequence[MemoryTier],
    state: TierPlacement | None = None,
) -> PlacedStep:
    """Plan a step, place it, and assign offloaded storages to tiers.

    Args:
        request: The planning request; the links of its profile are ignored.
        tiers: Memory tiers, in any order.
        state: Places of host-resident tensors, if another step has decided.

    Raises:
        PlanningError: The step does not fit the budget, or its offload the tiers.
    """

    def decided(request: StepRequest) -> tuple[StepPlan, Layout]:
        placed = place_step(request)
        return placed.plan, placed.layout

    plan, layout = _fastest(request, tiers, state, decided)
    return PlacedStep(plan, layout)


def plan_tiered_step(
    request: StepRequest,
    tiers: Sequence[MemoryTier],
    state: TierPlacement | None = None,
    *,
    planned: Callable[[StepRequest], StepPlan] = plan_step,
) -> StepPlan:
    """Plan a step without an arena, and assign offloaded storages to tiers.

    The arguments and errors are those of `place_tiered_step`; `planned` plans a
    request.
    """
    return _fastest(request, tiers, state, lambda asked: (planned(asked), None))[0]


def over_fastest(request: StepRequest, tiers: Sequence[MemoryTier]) -> StepRequest:
    """Return the request with the links of the fastest tier, if there are tiers."""
    if not tiers:
        return request
    return _with_links(request, min(tiers, key=lambda tier: tier.round_trip_ms))


def _fastest(
    request: StepRequest,
    tiers: Sequence[MemoryTier],
    state: TierPlacement | None,
    decided: Callable[[StepRequest], tuple[StepPlan, LayoutT]],
) -> tuple[StepPlan, LayoutT]:
    """Return the fastest simulated plan over the link rates of all tiers."""
    ordered = sorted(tiers, key=lambda tier: tier.round_trip_ms)
    slowest = ordered[-1]
    found: list[tuple[StepPlan, LayoutT]] = []
    error: PlanningError | None = None
    for tier in _links(ordered):
        if found and tier not in ordered:
            break
        plan, layout_of_plan = decided(_with_links(request, tier))
        try:
            plan = _in_tiers(plan, ordered, state)
        except PlanningError as e:
            error = error or e
            continue
        found.append((plan, layout_of_plan))
        used = plan.prediction.placement
        if used is not None and not any(used.used[1:]) and tier is not slowest:
            break  # the fastest tier has room for everything
    if not found and error is not None:
        raise error
    return min(found, key=lambda one: one[0].prediction.step_ms)


def _links(ordered: Sequence[MemoryTier]) -> Iterator[MemoryTier]:
    """Yield tiers with distinct links, then tiers with slower links."""
    rates = set()
    for tier in ordered:
        if (link := (tier.out_bytes_per_ms, tier.in_bytes_per_ms)) not in rates:
            rates.add(link)
            yield tier
    for factor in _SLOWER:
        yield replace(
            ordered[-1],
            out_bytes_per_ms=ordered[-1].out_bytes_per_ms / factor,
            in_bytes_per_ms=ordered[-1].in_bytes_per_ms / factor,
        )


def _with_links(request: StepRequest, tier: MemoryTier) -> StepRequest:
    profile = replace(
        request.profile,
        out_bytes_per_ms=tier.out_bytes_per_ms,
        in_bytes_per_ms=tier.in_bytes_per_ms,
    )
    return replace(request, profile=profile)


def _in_tiers(
    plan: StepPlan, tiers: Sequence[MemoryTier], state: TierPlacement | None
) -> StepPlan:
    """Assign a plan's offloaded storages to tiers and simulate it again."""
    state = state or place_state(plan.schedule, tiers)
    return replace(plan, prediction=fill_tiers(plan.prediction, state))
