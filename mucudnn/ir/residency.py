"""Where a tensor is while nobody uses it: what a residency policy decides."""

import enum

__all__ = ["RECOMPUTED", "RECOMPUTED_BACKWARD", "Residency"]


class Residency(enum.Enum):
    """Where a tensor is between its uses."""

    KEEP = "keep"
    OFFLOAD = "offload"
    """On the host before its backward uses; parameters and state in their longest gap.
    """
    RECOMPUTE = "recompute"
    """Computed once more and kept until its last use (speed-centric)."""
    RECOMPUTE_EACH = "recompute_each"
    """Computed again for every use (memory-centric)."""
    PAGE = "page"
    """Away whenever the node that runs does not use it."""
    RECOMPUTE_ALWAYS = "recompute_always"
    """Computed again for every use; slices also within the forward pass, but for the
    first use there."""


RECOMPUTED_BACKWARD = (Residency.RECOMPUTE, Residency.RECOMPUTE_EACH)
"""What has the producers of a tensor run again for the backward pass alone."""

RECOMPUTED = (*RECOMPUTED_BACKWARD, Residency.RECOMPUTE_ALWAYS)
"""What has the producers of a tensor run again."""
