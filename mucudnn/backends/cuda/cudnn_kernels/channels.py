"""Images as what has a number for each channel sees them."""

import math
from collections.abc import Sequence

__all__ = ["by_channel"]


def by_channel(shape: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Four axes (N, C, H, W) for an image, and whether its channels are last in memory.

    Kernels see images with channels last as (M, C), all pixels being samples; so do
    those of what has no pixels. Here they are the pixels of one image.
    """
    if len(shape) == 2:
        return (1, shape[1], shape[0], 1), True
    return (*shape[:2], math.prod(shape[2:]), 1), False
