"""Residency of a tensor between its uses, as decided by a policy."""

import enum

__all__ = ["RECOMPUTED", "RECOMPUTED_BACKWARD", "Residency"]


class Residency(enum.Enum):
    """Residency of a tensor between its uses."""

    KEEP = "keep"
    OFFLOAD = "offload"
    """Offload before the backward uses; parameters and state in their longest gap."""
    RECOMPUTE = "recompute"
    """Recompute once and keep until the last use (speed-centric)."""
    RECOMPUTE_EACH = "recompute_each"
    """Recompute for every backward use (memory-centric)."""
    PAGE = "page"
    """Offload whenever the running node does not use it."""
    RECOMPUTE_ALWAYS = "recompute_always"
    """Recompute for every use; slices also within the forward pass, except for the
    first use."""


RECOMPUTED_BACKWARD = (Residency.RECOMPUTE, Residency.RECOMPUTE_EACH)
"""Residencies that rerun a tensor's producers for the backward pass only."""

RECOMPUTED = (*RECOMPUTED_BACKWARD, Residency.RECOMPUTE_ALWAYS)
"""Residencies that rerun a tensor's producers."""
