"""Which storage goes to which memory off the device: the fastest is filled first.

Whether that was best, simulation says: copies to several tiers overlap, as each has
links of its own, so that some storages are better off in a slower tier than in a queue
for the fastest. And where the fastest has no room for all, it matters who gets it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mucudnn.errors import PlanningError
from mucudnn.ir.schedule import Schedule
from mucudnn.ir.sizes import exact_bytes, format_bytes
from mucudnn.ir.tiers import MemoryTier, TierPlacement
from mucudnn.passes.liveness import rounded
from mucudnn.passes.placement.layout import host_blocks, in_tiers
from mucudnn.passes.placement.packing import Block, pack
from mucudnn.passes.simulate import Prediction, simulate

__all__ = ["fill_tiers", "place_state"]

_MOVES = 64
"""Storages that are tried in a slower tier, the largest first."""

_WORTH = 1e-3
"""Share of a step's time for which a storage is moved to a slower tier."""


def place_state(schedule: Schedule, tiers: Sequence[MemoryTier]) -> TierPlacement:
    """Places for parameters and state that are host-resident, one beside the other.

    They stay there from step to step, whichever graph runs.

    Args:
        schedule: Says which.
        tiers: The fastest first.

    Raises:
        PlanningError: There is no room for them.
    """
    tensors = schedule.graph.tensors
    sizes = {name: rounded(tensors[name].nbytes) for name in schedule.hosted}
    blocks = [Block(name, nbytes, 0, 0) for name, nbytes in sizes.items()]
    capacities = [tier.nbytes if tier.addressable else 0 for tier in tiers]
    found, left = in_tiers(blocks, capacities)
    if left:
        able = [tier for tier in tiers if tier.addressable]
        raise _no_room(left, blocks, able)
    used = [0] * len(tiers)
    for name, (tier, offset) in found.items():
        used[tier] = max(used[tier], offset + sizes[name])
    return TierPlacement(tuple(tiers), found, tuple(used))


def fill_tiers(prediction: Prediction, state: TierPlacement) -> TierPlacement:
    """Places for all that leaves the device in a step, by simulating it.

    Args:
        prediction: Of the step; what its links are is not looked at.
        state: The tiers, the fastest first, and where parameters and state are that
            are host-resident.

    Raises:
        PlanningError: There is no room for it; says what there is.
    """
    filling = _Filling(prediction, state)
    blocks = host_blocks(prediction.schedule)
    by_absence = sorted(blocks, key=lambda b: b.last - b.first)
    by_size = sorted(blocks, key=lambda b: -b.nbytes)
    placed = [filling.placed(order) for order in (blocks, by_absence, by_size)]
    best = min((p for p in placed if p is not None), key=_step_ms, default=None)
    if best is None:
        left = in_tiers(blocks, filling.room)[1]
        raise _no_room(left, blocks, state.tiers, len(state.places))
    return filling.spread(by_size, best).placement


@dataclass(frozen=True, slots=True)
class _Trial:
    placement: TierPlacement
    order: Sequence[Block]
    step_ms: float


def _step_ms(trial: _Trial) -> float:
    return trial.step_ms


class _Filling:
    """Tiers that hold the state already, and a step to be simulated."""

    def __init__(self, prediction: Prediction, state: TierPlacement) -> None:
        self._prediction = prediction
        self._state = state
        pairs = zip(state.tiers, state.used, strict=True)
        self.room = [tier.nbytes - used for tier, used in pairs]

    def placed(
        self, blocks: Sequence[Block], beyond: Mapping[str, int] | None = None
    ) -> _Trial | None:
        """The step with blocks in the first tier that has room; None if none has."""
        found, left = in_tiers(blocks, self.room, beyond)
        if left:
            return None
        state = self._state
        used, places = list(state.used), dict(state.places)
        for block in blocks:
            tier, offset = found[block.name]
            places[block.name] = tier, state.used[tier] + offset
            end = state.used[tier] + offset + block.nbytes
            used[tier] = max(used[tier], end)
        placement = TierPlacement(state.tiers, places, tuple(used))
        schedule, profile = self._prediction.schedule, self._prediction.profile
        step_ms = simulate(schedule, profile, placement).step_ms
        return _Trial(placement, blocks, step_ms)

    def spread(self, blocks: Sequence[Block], best: _Trial) -> _Trial:
        """Move storages to slower tiers as long as the step gets faster."""
        beyond: dict[str, int] = {}
        if best.step_ms <= self._prediction.compute_ms * (1 + _WORTH):
            return best
        for block in blocks[:_MOVES]:
            tier = best.placement.number(block.name) + 1
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
            f"{what}; they are parameters and state, which go where the host can read "
            "them: add the tier host or disk:FOLDER"
        )
    remedy = "give more of them, or another tier"
    if any(t.name.startswith("disk:") for t in tiers):
        remedy += "; a disk's free space and `ulimit -f` count, too"
    return PlanningError(f"{what}; there are {there}{beside}: {remedy}")
