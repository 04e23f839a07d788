"""Share a mini-batch anew where ranks drift from their measured times."""

from collections.abc import Sequence
from dataclasses import replace

from mucudnn.ir.fleet import Fleet
from mucudnn.passes.fleet.plan import FleetPlan, plan_of
from mucudnn.passes.fleet.split import split_batch

__all__ = ["GAIN", "TOLERANCE", "drifted", "replanned"]

TOLERANCE = 0.15
"""Relative drift of a rank's time that is ignored."""

GAIN = 0.05
"""Fraction of the step that another split must save to be worth the change."""


def drifted(fleet: Fleet, factors: Sequence[float]) -> Fleet:
    """Return the fleet with each rank's times scaled by its factor."""
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
    """Return a better split if ranks drifted and the change pays; else None.

    Two thresholds keep the split from oscillating: drift within the tolerance is
    ignored, and a change that saves less than the gain is not made.

    Args:
        fleet: The fleet as it was measured.
        samples: The current split.
        factors: Current time of each rank over the time in its table.
        at_least: Minimum samples of every rank.
        tolerance: Relative drift that is ignored.
        gain: Fraction of the step's time that a change must save.
    """
    low, high = 1 / (1 + tolerance), 1 + tolerance
    seen = [1.0 if low <= factor <= high else factor for factor in factors]
    now = drifted(fleet, seen)
    found = split_batch(now, sum(samples), at_least=at_least)
    kept = plan_of(now, samples)
    return found if found.step_ms <= (1 - gain) * kept.step_ms else None
