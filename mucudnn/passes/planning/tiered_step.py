"""A step whose tensors leave to several memories, each with links of its own.

Residencies are decided at the rates of one tier, which is fast but may be small, or
large and slow. So the step is planned once at the rates of each, its storages are given
to tiers, and what simulates as the fastest counts. Where there is no room for what
leaves, it is planned as if links were slower still: then more is computed again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mucudnn.errors import PlanningError
from mucudnn.ir.tiers import MemoryTier, TierPlacement
from mucudnn.passes.placement.layout import PlacedStep
from mucudnn.passes.placement.tiers import fill_tiers, place_state
from mucudnn.passes.planning.place_step import place_step
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.simulate import simulate

__all__ = ["place_tiered_step"]

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
    ordered = sorted(tiers, key=lambda tier: tier.round_trip_ms)
    slowest = ordered[-1]
    found: list[PlacedStep] = []
    error: PlanningError | None = None
    for tier in _links(ordered):
        if found and tier not in ordered:
            break
        placed = place_step(_with_links(request, tier))
        try:
            found.append(_in_tiers(placed, ordered, state))
        except PlanningError as e:
            error = error or e
            continue
        used = found[-1].plan.prediction.placement
        if used is not None and not any(used.used[1:]) and tier is not slowest:
            break  # the fastest has room for all
    if not found and error is not None:
        raise error
    return min(found, key=lambda placed: placed.plan.prediction.step_ms)


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
    placed: PlacedStep, tiers: Sequence[MemoryTier], state: TierPlacement | None
) -> PlacedStep:
    """The same step with a place for all that leaves.

    Raises:
        PlanningError: There is no room.
    """
    prediction = placed.plan.prediction
    placement = fill_tiers(prediction, state or place_state(placed.schedule, tiers))
    told = simulate(prediction.schedule, prediction.profile, placement)
    return replace(placed, plan=replace(placed.plan, prediction=told))
