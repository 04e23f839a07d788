"""An algorithm of the CPU library, and regions of its workspace."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem

Arrays = tuple[Any, Any, Any]
"""Two inputs and the output, in the order of `ConvLibrary.run`."""


class Kernel(Protocol):
    """A problem planned for a number of workers.

    It holds sizes and strides but no arrays, so threads can share it.
    """

    @property
    def nbytes(self) -> int:
        """Exact workspace in bytes."""

    def run(
        self, arrays: Arrays, workspace: Any, workers: Workers, accumulate: bool
    ) -> None:
        """Run inside the workspace with as many workers as planned.

        Arrays are views in logical axis order, whatever `problem.layout` says:
        (N, C, *spatial) and (K, C // groups, *kernel); with `NHWC` their strides are
        channels-last. `workspace` is 64-byte aligned and has exactly `nbytes` bytes.
        Beyond it, two workers together may allocate less than 80 KiB, Python's own
        objects included, and each further one 16 KiB, for NumPy's per-thread buffers.
        """


@dataclass(frozen=True)
class Algorithm:
    """A way to compute a convolution, under cuDNN's name of it.

    `kernel` maps (problem, number of workers) to a planned kernel, `excluded` a problem
    to the reason why it cannot be run, if so. `notes` are further notes for `Traits`.
    """

    name: str
    kernel: Callable[[ConvProblem, int], Kernel]
    excluded: Callable[[ConvProblem], str | None] = lambda problem: None
    notes: tuple[str, ...] = ()


# Typed arrays in a workspace: their total size and the arrays themselves.
#
# One layout function both sizes and cuts a workspace, so the two cannot disagree.


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
