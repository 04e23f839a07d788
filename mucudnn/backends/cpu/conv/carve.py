"""Typed arrays in a workspace: their total size and the arrays themselves.

One layout function both sizes and cuts a workspace, so the two cannot disagree.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Region", "carve", "nbytes"]

ALIGNMENT = 64

Region = tuple[tuple[int, ...], str]
"""Shape and NumPy data type of one array in a workspace."""


def nbytes(regions: Sequence[Region]) -> int:
    """Return the bytes that `carve` needs for these regions."""
    return sum(_extent(region)[1] for region in regions)


def carve(workspace: Any, regions: Sequence[Region]) -> list[Any]:
    """Return uninitialised arrays over consecutive, aligned parts of `workspace`."""
    arrays, offset = [], 0
    for region in regions:
        shape, dtype = region
        size, padded = _extent(region)
        arrays.append(workspace[offset : offset + size].view(dtype).reshape(shape))
        offset += padded
    return arrays


@functools.lru_cache(maxsize=4096)
def _extent(region: Region) -> tuple[int, int]:
    """Return the bytes of an array, without and with padding to the next one."""
    shape, dtype = region
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return size, -(-size // ALIGNMENT) * ALIGNMENT
