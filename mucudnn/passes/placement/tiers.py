"""Assign offloaded storages to memory tiers, the fastest tier first.

Assignments are compared by simulation. Each tier has links of its own and copies to
several tiers overlap, so that some storages do better in a slower tier than in a queue
for the fastest.
"""

import math
from collections.abc import Mapping, Sequence

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


Simulated = tuple[Prediction, Mapping[str, tuple[int, int]]]
"""A step with its storages in tiers, and the tier and offset of each storage."""


def fill_tiers(prediction: Prediction, state: TierPlacement) -> Prediction:
    """Place all storages a step offloads; return the fastest simulated placement.

    Raises:
        PlanningError: The tiers have too little room.
    """
    schedule, profile, tiers = prediction.schedule, prediction.profile, state.tiers
    pairs = zip(tiers, state.used, strict=True)
    room = [tier.nbytes - used for tier, used in pairs]

    def simulated(
        order: Sequence[Block], beyond: Mapping[str, int] | None = None
    ) -> Simulated | None:
        """Place each block in the first tier with room, beside the state."""
        found, left = in_tiers(order, room, beyond)
        if left:
            return None
        used, places = list(state.used), dict(state.places)
        for block in order:
            tier, offset = found[block.name]
            places[block.name] = tier, state.used[tier] + offset
            used[tier] = max(used[tier], state.used[tier] + offset + block.nbytes)
        placement = TierPlacement(tiers, places, tuple(used))
        return simulate(schedule, profile, placement), places

    blocks = host_blocks(schedule)
    by_absence = sorted(blocks, key=lambda b: b.last - b.first)
    by_size = sorted(blocks, key=lambda b: -b.nbytes)
    tried = [(order, simulated(order)) for order in (blocks, by_absence, by_size)]
    fitting = [(order, found) for order, found in tried if found is not None]
    if not fitting:
        left = in_tiers(blocks, room)[1]
        raise _no_room(left, blocks, tiers, len(state.places))
    order, (best, places) = min(fitting, key=lambda one: one[1][0].step_ms)
    beyond: dict[str, int] = {}
    # Move storages to slower tiers while the step gets faster.
    waits = best.step_ms > prediction.compute_ms * (1 + _WORTH)
    for block in by_size[:_MOVES] if waits else ():
        tier = places[block.name][0] + 1
        if tier == len(tiers):
            continue
        moved = simulated(order, {**beyond, block.name: tier})
        if moved is not None and moved[0].step_ms < best.step_ms * (1 - _WORTH):
            (best, places), beyond[block.name] = moved, tier
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
        f"no room for {exact_bytes(short)} of the {exact_bytes(needed)} to be offloaded"
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
