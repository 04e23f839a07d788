"""Every scheduler that ships, in one table."""

from mucudnn.passes.scheduling.adaptive_window import adaptive_window
from mucudnn.passes.scheduling.problem import SCHEDULERS, on_demand
from mucudnn.passes.scheduling.transfer_aware import timed

__all__ = ["SCHEDULERS", "adaptive_window", "on_demand", "timed"]
