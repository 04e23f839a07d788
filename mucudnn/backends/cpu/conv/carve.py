"""Cut typed arrays out of a workspace, and add up what they will take.

The same layout function sizes a workspace and cuts it, so the two cannot disagree.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Region", "carve", "nbytes"]

ALIGNMENT = 64

Region = tuple[tuple[int, ...], str]
"""Shape and NumPy data type of one array in a workspace."""


def nbytes(regions: Sequence[Region]) -> int:
    """Bytes that `carve` needs for these regions."""
    return sum(_padded(region) for region in regions)


def carve(workspace: Any, regions: Sequence[Region]) -> list[Any]:
    """Uninitialised arrays over consecutive, aligned parts of `workspace`."""
    arrays, offset = [], 0
    for shape, dtype in regions:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        arrays.append(workspace[offset : offset + size].view(dtype).reshape(shape))
        offset += _padded((shape, dtype))
    return arrays


def _padded(region: Region) -> int:
    shape, dtype = region
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT
