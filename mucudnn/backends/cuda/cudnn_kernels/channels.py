"""Image shapes as seen by operations with per-channel parameters."""

import math
from collections.abc import Sequence

__all__ = ["by_channel"]


def by_channel(shape: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Return four axes (N, C, H, W), and whether channels are last in memory.

    Kernels get images with channels last as (M, C), all pixels being samples, and so
    are tensors without pixels. Here they become the pixels of one image.
    """
    if len(shape) == 2:
        return (1, shape[1], shape[0], 1), True
    return (*shape[:2], math.prod(shape[2:]), 1), False
