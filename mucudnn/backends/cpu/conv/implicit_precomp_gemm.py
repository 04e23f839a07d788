"""IMPLICIT_PRECOMP_GEMM: patches of one tile at a time, at precomputed offsets.

The offsets of a tile's patches are computed once, as strides of a small padded copy of
the tile's input. The patches are copied into a buffer that stays in cache and are
multiplied at once. Workspace does not grow with the batch.
"""

import math

from mucudnn.backends.cpu.conv.algorithm import Algorithm, Kernel
from mucudnn.backends.cpu.conv.lowering.correlation import Correlation
from mucudnn.backends.cpu.conv.lowering.filter_gradient import FilterGradient
from mucudnn.backends.cpu.conv.lowering.scattering import Scattering
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["ALGORITHM"]

_TILE_BYTES = 2 << 20  # of patches: short calls cost more than cache misses
_FEW_CHANNELS = 16  # rows below which a product does not fill the vector units


def _kernel(problem: ConvProblem, workers: int) -> Kernel:
    if problem.direction is Direction.BACKWARD_FILTER:
        return FilterGradient(problem, workers, _TILE_BYTES)
    if problem.direction is Direction.BACKWARD_DATA and _scatters(problem):
        return Scattering(problem, workers, _TILE_BYTES)
    return Correlation(problem, workers, _TILE_BYTES)


def _scatters(problem: ConvProblem) -> bool:
    """Return whether to scatter patches of dx rather than to gather patches of dy.

    With a stride, gathering takes one product per residue class of positions, with
    short rows; if patches do not overlap, these products are all the work there is.
    """
    _, channels, *kernel = problem.w_shape
    overlapping = math.prod(kernel) > math.prod(problem.stride) > 1
    return problem.groups == 1 and (channels < _FEW_CHANNELS or overlapping)


ALGORITHM = Algorithm("IMPLICIT_PRECOMP_GEMM", _kernel)
