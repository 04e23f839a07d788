"""Load balancing: share a mini-batch among unequal devices that wait for each other."""

from mucudnn.passes.fleet.baselines import (
    best_rate,
    equal_shares,
    proportional_shares,
    step_bound_ms,
)
from mucudnn.passes.fleet.plan import FleetPlan, Share, plan_of
from mucudnn.passes.fleet.replan import drifted, replanned
from mucudnn.passes.fleet.share_times import ShareTimes, share_times
from mucudnn.passes.fleet.split import best_batch, split_batch

__all__ = [
    "FleetPlan",
    "Share",
    "ShareTimes",
    "best_batch",
    "best_rate",
    "drifted",
    "equal_shares",
    "plan_of",
    "proportional_shares",
    "replanned",
    "share_times",
    "split_batch",
    "step_bound_ms",
]
