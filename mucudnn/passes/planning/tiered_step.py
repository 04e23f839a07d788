"""A step whose tensors leave to several memories, each with links of its own.

Residencies are decided at the rates of one tier, which is fast but may be small, or
large and slow. So the step is planned once at the rates of each, its storages are given
to tiers, and what simulates as the fastest counts. Where there is no room for what
leaves, it is planned as if links were slower still: then more is computed again.
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

Where = TypeVar("Where")

_SLOWER = (4.0, 16.0, 64.0)
"""How much slower links are imagined where there is no room for what leaves."""


def place_tiered_step(
    request: StepRequest,
    tiers: Sequence[MemoryTier],
    state: TierPlacement | None = None,
) -> PlacedStep:
    """Plan a step, place it, and say which storage goes to which tier.

    Args:
        request: What is asked; the links of its profile are not looked at.
        tiers: What there is beside the device, in any order.
        state: Where what is host-resident is, if another step that shares it decided.

    Raises:
        PlanningError: It cannot fit the budget, or what leaves has no room.
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
    """Plan a step that an allocator gives its memory, and say what goes to which tier.

    Args:
        request: What is asked; the links of its profile are not looked at.
        tiers: What there is beside the device, in any order.
        state: Where what is host-resident is, if another step that shares it decided.
        planned: What plans it at given links.

    Raises:
        PlanningError: It cannot fit the budget, or what leaves has no room.
    """
    return _fastest(request, tiers, state, lambda asked: (planned(asked), None))[0]


def over_fastest(request: StepRequest, tiers: Sequence[MemoryTier]) -> StepRequest:
    """A step over the links of its fastest tier, as if that had room for all."""
    return _with_links(request, min(tiers, key=_round_trip_ms))


def _fastest(
    request: StepRequest,
    tiers: Sequence[MemoryTier],
    state: TierPlacement | None,
    decided: Callable[[StepRequest], tuple[StepPlan, Where]],
) -> tuple[StepPlan, Where]:
    """Of the plans at the rates of each tier, the one that is simulated as fastest.

    Raises:
        PlanningError: There is none.
    """
    ordered = sorted(tiers, key=_round_trip_ms)
    slowest = ordered[-1]
    found: list[tuple[StepPlan, Where]] = []
    error: PlanningError | None = None
    for tier in _links(ordered):
        if found and tier not in ordered:
            break
        plan, where = decided(_with_links(request, tier))
        try:
            plan = _in_tiers(plan, ordered, state)
        except PlanningError as e:
            error = error or e
            continue
        found.append((plan, where))
        used = plan.prediction.placement
        if used is not None and not any(used.used[1:]) and tier is not slowest:
            break  # the fastest has room for all
    if not found and error is not None:
        raise error
    return min(found, key=lambda one: one[0].prediction.step_ms)


def _round_trip_ms(tier: MemoryTier) -> float:
    return tier.round_trip_ms


def _links(ordered: Sequence[MemoryTier]) -> Iterator[MemoryTier]:
    """Rates to plan with: those of the tiers, then slower ones."""
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
    """The same step with a place for all that leaves.

    Raises:
        PlanningError: There is no room.
    """
    prediction = plan.prediction
    placement = fill_tiers(prediction, state or place_state(plan.schedule, tiers))
    told = simulate(prediction.schedule, prediction.profile, placement)
    return replace(plan, prediction=told)
