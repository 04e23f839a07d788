"""IMPLICIT_PRECOMP_GEMM: patches of one tile at a time, where each is precomputed.

The offsets of a tile's patches are worked out once, as strides of a small padded copy
of what the tile reads; the patches are copied into a buffer that stays in cache and is
multiplied at once. Workspace does not grow with the batch.
"""

import math

from mucudnn.backends.cpu.conv.algorithm import Algorithm, Kernel
from mucudnn.backends.cpu.conv.lowering.correlation import Correlation
from mucudnn.backends.cpu.conv.lowering.filter_gradient import FilterGradient
from mucudnn.backends.cpu.conv.lowering.scattering import Scattering
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["ALGORITHM"]

_TILE_BYTES = 2 << 20  # of patches: short calls cost more than a cache that is missed
_FEW_CHANNELS = 16  # rows below which a product does not fill the vector units


def _kernel(problem: ConvProblem, workers: int) -> Kernel:
    if problem.direction is Direction.BACKWARD_FILTER:
        return FilterGradient(problem, workers, _TILE_BYTES)
    if problem.direction is Direction.BACKWARD_DATA and _scatters(problem):
        return Scattering(problem, workers, _TILE_BYTES)
    return Correlation(problem, workers, _TILE_BYTES)


def _scatters(problem: ConvProblem) -> bool:
    """Whether patches of dx are added up, sooner than patches of dy gathered.

    With a stride, gathering takes a product for each residue class of positions, of
    short rows; where patches do not overlap, these are all that there is to do.
    """
    _, channels, *kernel = problem.w_shape
    overlapping = math.prod(kernel) > math.prod(problem.stride) > 1
    return problem.groups == 1 and (channels < _FEW_CHANNELS or overlapping)


ALGORITHM = Algorithm("IMPLICIT_PRECOMP_GEMM", _kernel)
