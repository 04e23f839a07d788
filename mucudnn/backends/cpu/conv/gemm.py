"""GEMM: explicit lowering, one large product a worker.

All patches of the micro-batch are written to the workspace, which grows with it, and
multiplied at once: the largest products that can be had, where images are small.
"""

import functools
import math
from typing import Any

from mucudnn.backends.cpu.conv.algorithm import Algorithm
from mucudnn.backends.cpu.conv.carve import nbytes
from mucudnn.backends.cpu.conv.lowering.correlation import Correlation
from mucudnn.backends.cpu.conv.lowering.filter_gradient import FilterGradient
from mucudnn.backends.cpu.conv.lowering.scattering import Scattering
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["ALGORITHM"]


@functools.lru_cache(maxsize=256)  # sizes and strides, no arrays
def _kernel(
    problem: ConvProblem, workers: int
) -> Correlation | FilterGradient | Scattering:
    match problem.direction:
        case Direction.FORWARD:
            return Correlation(problem, workers, math.inf)
        case Direction.BACKWARD_DATA:
            return Scattering(problem, workers, math.inf)
        case Direction.BACKWARD_FILTER:
            return FilterGradient(problem, workers, math.inf)


def _excluded(problem: ConvProblem) -> str | None:
    return None


def _workspace(problem: ConvProblem, workers: int) -> int:
    return nbytes(_kernel(problem, workers).regions)


def _run(
    problem: ConvProblem,
    a: Any,
    b: Any,
    out: Any,
    workspace: Any,
    workers: Workers,
    accumulate: bool,
) -> None:
    kernel = _kernel(problem, workers.count)
    kernel.run(a, b, out, workspace, workers, accumulate)


ALGORITHM = Algorithm("GEMM", _excluded, _workspace, _run)
