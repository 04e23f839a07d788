"""IMPLICIT_PRECOMP_GEMM: patches of one tile at a time, where each is precomputed.

The offsets of a tile's patches are worked out once, as strides of a small padded copy
of what the tile reads; the patches are copied into a buffer that stays in cache and is
multiplied at once. Workspace does not grow with the batch.
"""

from mucudnn.backends.cpu.conv.algorithm import Algorithm, Kernel
from mucudnn.backends.cpu.conv.lowering.correlation import Correlation
from mucudnn.backends.cpu.conv.lowering.filter_gradient import FilterGradient
from mucudnn.backends.cpu.conv.lowering.scattering import Scattering
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["ALGORITHM"]

_TILE_BYTES = 768 << 10  # patches that stay in a core's second-level cache
_FEW_CHANNELS = 16  # rows below which a product does not fill the vector units


def _kernel(problem: ConvProblem, workers: int) -> Kernel:
    if problem.direction is Direction.BACKWARD_FILTER:
        return FilterGradient(problem, workers, _TILE_BYTES)
    if (
        problem.direction is Direction.BACKWARD_DATA
        and problem.w_shape[1] < _FEW_CHANNELS
        and problem.groups == 1
    ):
        return Scattering(problem, workers, _TILE_BYTES)
    return Correlation(problem, workers, _TILE_BYTES)


ALGORITHM = Algorithm("IMPLICIT_PRECOMP_GEMM", _kernel)
