"""Half-precision filter gradients summed over micro-batches in float32.

cuDNN rounds the sum to half precision after every micro-batch, which loses bits over
many of them. Here each partial gradient goes to a buffer of its own and is added to a
float32 sum, which is rounded once more into the gradient. Buffer and sum are part of
the workspace: 6 bytes an element of the filter, ahead of the engine's own scratch.
"""

import functools
import math
from dataclasses import replace
from typing import Any

from mucudnn.backends.cuda.conv.launch import Launch, Operands
from mucudnn.backends.cuda.kernels.launch import THREADS, Program, compiler_options
from mucudnn.backends.cuda.loading import with_remedy
from mucudnn.errors import BackendError
from mucudnn.ir.conv import ConvProblem, Direction

SUFFIX = "+f32"
"""Suffix of the names of algorithms that sum in float32."""

_HALVES = ("float16", "bfloat16")
_ALIGN = 256
_MOST_BLOCKS = 1024
PROGRAM = Program.load("conv/float32_sum.cu")


def applies(problem: ConvProblem) -> bool:
    """Return whether summing parts of this result in its type loses bits."""
    return problem.direction is Direction.BACKWARD_FILTER and problem.dtype in _HALVES


def scratch(problem: ConvProblem) -> int:
    """Return the bytes of the float32 sum and of one part, a multiple of 256."""
    count = math.prod(problem.w_shape)
    return _rounded(4 * count) + _rounded(2 * count)


def engine_operands(problem: ConvProblem, operands: Operands) -> Operands:
    """Return operands for the engine: it writes its part into the workspace."""
    part = operands.workspace + _rounded(4 * math.prod(problem.w_shape))
    used = scratch(problem)
    workspace, nbytes = operands.workspace + used, operands.nbytes - used
    return replace(operands, out=part, workspace=workspace, nbytes=nbytes)


def add_launch(
    problem: ConvProblem, operands: Operands, *, first: bool, accumulate: bool
) -> Launch:
    """Return a call that adds the part to the sum and writes the rounded gradient.

    `operands` are those of the whole algorithm, not of its engine. At `first` the sum
    starts, with `accumulate` from the gradient's current value.
    """
    count = math.prod(problem.w_shape)
    blocks = min(_MOST_BLOCKS, -(-count // THREADS))
    part = operands.workspace + _rounded(4 * count)

    def launch(handle: int, *arguments: Any) -> int:
        try:
            _kernel(problem.dtype)((blocks,), (THREADS,), arguments)
        except Exception as e:  # CuPy failed to compile, to load or to launch
            raise BackendError(
                with_remedy(f"sum_{problem.dtype} cannot be launched: {e}")
            ) from e
        return 0

    import numpy as np

    addresses = map(np.uint64, (part, operands.workspace, operands.out))
    arguments = *addresses, np.int64(count), np.int32(first), np.int32(accumulate)
    return Launch(launch, arguments, f"sum_{problem.dtype}")


@functools.cache
def _kernel(dtype: str) -> Any:
    import cupy

    options = compiler_options(dtype, wide=True)
    return cupy.RawKernel(PROGRAM.source, "sum_parts", options)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
