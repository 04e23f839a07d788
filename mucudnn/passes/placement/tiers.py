"""Assign offloaded storages to memory tiers, the fastest tier first.

Assignments are compared by simulation. Each tier has links of its own and copies to
several tiers overlap, so that some storages do better in a slower tier than in a queue
for the fastest.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mucudnn.errors import PlanningError
from mucudnn.ir.profile import MemoryTier, TierPlacement
from mucudnn.ir.schedule import Schedule
from mucudnn.ir.sizes import exact_bytes, format_bytes
from mucudnn.passes.liveness import rounded
from mucudnn.passes.placement.layout import host_blocks, in_tiers
from mucudnn.passes.placement.packing import Block, pack
from mucudnn.passes.simulate import Prediction, simulate

_MOVES = 64
"""Number of storages, the largest first, that are tried in a slower tier."""

_WORTH = 1e-3
"""Fraction of the step that moving a storage to a slower tier must save."""


def place_state(schedule: Schedule, tiers: Sequence[MemoryTier]) -> TierPlacement:
    """Place host-resident parameters and state, which keep their places in all steps.

    Raises:
        PlanningError: The tiers have too little room.
    """
    tensors = schedule.graph.tensors
    sizes = {name: rounded(tensors[name].nbytes) for name in schedule.hosted}
    blocks = [Block(name, nbytes, 0, 0) for name, nbytes in sizes.items()]
    capacities = [tier.nbytes if tier.addressable else 0 for tier in tiers]
    found, left = in_tiers(blocks, capacities)
    if left:
        addressable = [tier for tier in tiers if tier.addressable]
        raise _no_room(left, blocks, addressable)
    used = [0] * len(tiers)
    for name, (tier, offset) in found.items():
        used[tier] = max(used[tier], offset + sizes[name])
    return TierPlacement(tuple(tiers), found, tuple(used))


def fill_tiers(prediction: Prediction, state: TierPlacement) -> TierPlacement:
    """Place all storages a step offloads, comparing placements by simulation.

    Raises:
        PlanningError: The tiers have too little room.
    """
    filling = _Filling(prediction, state)
    blocks = host_blocks(prediction.schedule)
    by_absence = sorted(blocks, key=lambda b: b.last - b.first)
    by_size = sorted(blocks, key=lambda b: -b.nbytes)
    placed = [filling.placed(order) for order in (blocks, by_absence, by_size)]
    found = (p for p in placed if p is not None)
    best = min(found, key=lambda trial: trial.step_ms, default=None)
    if best is None:
        left = in_tiers(blocks, filling.room)[1]
        raise _no_room(left, blocks, state.tiers, len(state.places))
    return filling.spread(by_size, best).placement


@dataclass(frozen=True, slots=True)
class _Trial:
    placement: TierPlacement
    order: Sequence[Block]
    step_ms: float


class _Filling:
    """Tiers that hold the state already, and a step to simulate."""

    def __init__(self, prediction: Prediction, state: TierPlacement) -> None:
        self._prediction = prediction
        self._state = state
        pairs = zip(state.tiers, state.used, strict=True)
        self.room = [tier.nbytes - used for tier, used in pairs]

    def placed(
        self, blocks: Sequence[Block], beyond: Mapping[str, int] | None = None
    ) -> _Trial | None:
        """Place each block in the first tier with room and simulate, or None."""
        found, left = in_tiers(blocks, self.room, beyond)
        if left:
            return None
        state = self._state
        used, places = list(state.used), dict(state.places)
        for block in blocks:
            tier, offset = found[block.name]
            places[block.name] = tier, state.used[tier] + offset
            used[tier] = max(used[tier], state.used[tier] + offset + block.nbytes)
        placement = TierPlacement(state.tiers, places, tuple(used))
        schedule, profile = self._prediction.schedule, self._prediction.profile
        return _Trial(placement, blocks, simulate(schedule, profile, placement).step_ms)

    def spread(self, blocks: Sequence[Block], best: _Trial) -> _Trial:
        """Move storages to slower tiers while the step gets faster."""
        beyond: dict[str, int] = {}
        if best.step_ms <= self._prediction.compute_ms * (1 + _WORTH):
            return best
        for block in blocks[:_MOVES]:
            tier = best.placement.places[block.name][0] + 1
            if tier == len(self._state.tiers):
                continue
            trial = self.placed(best.order, {**beyond, block.name: tier})
            if trial is not None and trial.step_ms < best.step_ms * (1 - _WORTH):
                best, beyond[block.name] = trial, tier
        return best


def _no_room(
    left: Sequence[Block],
    blocks: Sequence[Block],
    tiers: Sequence[MemoryTier],
    held: int = 0,
) -> PlanningError:
    short, needed = pack(left).nbytes, pack(blocks).nbytes
    sizes = (
        "all" if math.isinf(t.nbytes) else format_bytes(int(t.nbytes), short, needed)
        for t in tiers
    )
    there = ", ".join(f"{n} of {t.name}" for n, t in zip(sizes, tiers, strict=True))
    beside = f", {held} parameters and state beside it" if held else ""
    what = (
        f"no room for {exact_bytes(short)} of the {exact_bytes(needed)} that leave the "
        "device"
    )
    if not there:
        return PlanningError(
            f"{what}; they are parameters and optimizer state, which need a target "
            "that the host can read: add the tier host or disk:FOLDER"
        )
    remedy = "give more of them, or another tier"
    if any(t.name.startswith("disk:") for t in tiers):
        remedy += "; a disk's free space and `ulimit -f` count, too"
    return PlanningError(f"{what}; there are {there}{beside}: {remedy}")
