"""Whether it pays to share out a mini-batch anew, when ranks are not what they were."""

from collections.abc import Sequence
from dataclasses import replace

from mucudnn.ir.fleet import Fleet
from mucudnn.passes.fleet.plan import FleetPlan, plan_of
from mucudnn.passes.fleet.split import split_batch

__all__ = ["GAIN", "TOLERANCE", "drifted", "replanned"]

TOLERANCE = 0.15
"""How far a rank's time may be from its table's, as a fraction, and be as planned."""

GAIN = 0.05
"""What another split must save of a step, as a fraction, to be worth the change."""


def drifted(fleet: Fleet, factors: Sequence[float]) -> Fleet:
    """The fleet as it is now.

    Args:
        fleet: As it was measured.
        factors: How many times as long as its table says each rank takes.
    """
    ranks = (
        replace(rank, table=rank.table.scaled(factor))
        for rank, factor in zip(fleet.ranks, factors, strict=True)
    )
    return replace(fleet, ranks=tuple(ranks))


def replanned(
    fleet: Fleet,
    samples: Sequence[int],
    factors: Sequence[float],
    *,
    at_least: int = 0,
    tolerance: float = TOLERANCE,
    gain: float = GAIN,
) -> FleetPlan | None:
    """Another split, where ranks have left their tables and it pays; else None.

    Two thresholds keep a split from swinging: a rank within the tolerance is taken as
    it was measured, and a change that saves less than the gain is not made.

    Args:
        fleet: As it was measured.
        samples: The split as it is.
        factors: How many times as long as its table says each rank takes.
        at_least: Samples of every rank.
        tolerance: Of factors, as a fraction.
        gain: Of a step's time, as a fraction.
    """
    low, high = 1 / (1 + tolerance), 1 + tolerance
    seen = [1.0 if low <= factor <= high else factor for factor in factors]
    now = drifted(fleet, seen)
    found = split_batch(now, sum(samples), at_least=at_least)
    kept = plan_of(now, samples)
    return found if found.step_ms <= (1 - gain) * kept.step_ms else None
