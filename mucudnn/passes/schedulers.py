"""Every scheduler that ships, in one table."""

from mucudnn.passes.adaptive_window import adaptive_window
from mucudnn.passes.timed import timed
from mucudnn.passes.window import SCHEDULERS, on_demand

__all__ = ["SCHEDULERS", "adaptive_window", "on_demand", "timed"]
