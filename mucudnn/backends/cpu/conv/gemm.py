"""GEMM: explicit lowering, one large matrix product per worker.

All patches of the micro-batch are written to the workspace, which grows with it, and
multiplied at once. This gives the largest products where images are small.
"""

import math

from mucudnn.backends.cpu.conv.algorithm import Algorithm, Kernel
from mucudnn.backends.cpu.conv.lowering.correlation import Correlation
from mucudnn.backends.cpu.conv.lowering.filter_gradient import FilterGradient
from mucudnn.backends.cpu.conv.lowering.scattering import Scattering
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["ALGORITHM"]


def _kernel(problem: ConvProblem, workers: int) -> Kernel:
    match problem.direction:
        case Direction.FORWARD:
            return Correlation(problem, workers, math.inf)
        case Direction.BACKWARD_DATA:
            return Scattering(problem, workers, math.inf)
        case Direction.BACKWARD_FILTER:
            return FilterGradient(problem, workers, math.inf)


ALGORITHM = Algorithm("GEMM", _kernel)
