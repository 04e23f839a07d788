"""Plan a step that offloads to several memory tiers, each with links of its own.

Residencies are decided at the link rates of one tier, while tiers differ in speed and
size. The step is therefore planned at the rates of each tier, storages are assigned to
tiers, and the fastest simulated plan is chosen. If the tiers have too little room, the
step is planned for slower links, which favours recomputation.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from mucudnn.errors import PlanningError
from mucudnn.ir.tiers import MemoryTier, TierPlacement
from mucudnn.passes.placement.layout import Layout, PlacedStep
from mucudnn.passes.placement.tiers import fill_tiers, place_state
from mucudnn.passes.planning.place_step import place_step
from mucudnn.passes.planning.plan_step import plan_step
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.passes.simulate import simulate

__all__ = ["over_fastest", "place_tiered_step", "plan_tiered_step"]

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
    """Return the request with the links of the fastest tier."""
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
    prediction = plan.prediction
    placement = fill_tiers(prediction, state or place_state(plan.schedule, tiers))
    simulated = simulate(prediction.schedule, prediction.profile, placement)
    return replace(plan, prediction=simulated)
