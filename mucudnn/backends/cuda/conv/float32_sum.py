"""Half-precision filter gradients summed over micro-batches in float32.

cuDNN adds a part to a half-precision gradient by rounding the sum to half each time;
over many parts that loses bits. Here each part goes to a buffer of its own and is added
to a float32 sum, which is rounded once more into the gradient. Buffer and sum are part
of the workspace: 6 bytes an element of the filter, ahead of the engine's own scratch.

The kernels convert by bits and by PTX, so that they need no header of the toolkit.
"""

import functools
import math
from typing import Any

from mucudnn.backends.cuda.conv.launch import Launch, Operands
from mucudnn.backends.cuda.remedies import with_remedy
from mucudnn.errors import BackendError
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["SOURCE", "SUFFIX", "add_launch", "applies", "engine_operands", "scratch"]

SUFFIX = "+f32"
"""Ends the name of an algorithm that sums in float32."""

_HALVES = ("float16", "bfloat16")
_ALIGN = 256
_THREADS = 256
_MOST_BLOCKS = 1024

SOURCE = r"""
__device__ float widen_float16(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ unsigned short narrow_float16(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ float widen_bfloat16(unsigned short bits) {
    return __uint_as_float(static_cast<unsigned int>(bits) << 16);
}
__device__ unsigned short narrow_bfloat16(float value) {
    unsigned int bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
#define SUM(TYPE)                                                                \
extern "C" __global__ void sum_##TYPE(const unsigned short* part, float* sum,    \
                                      unsigned short* out, long long count,      \
                                      int first, int accumulate) {               \
    long long step = static_cast<long long>(gridDim.x) * blockDim.x;             \
    long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; \
    for (; i < count; i += step) {                                               \
        float before = first ? (accumulate ? widen_##TYPE(out[i]) : 0.0f)        \
                             : sum[i];                                           \
        float after = before + widen_##TYPE(part[i]);                            \
        sum[i] = after;                                                          \
        out[i] = narrow_##TYPE(after);                                           \
    }                                                                            \
}
SUM(float16)
SUM(bfloat16)
"""


def applies(problem: ConvProblem) -> bool:
    """Whether adding up parts of this result loses bits that float32 would keep."""
    return problem.direction is Direction.BACKWARD_FILTER and problem.dtype in _HALVES


def scratch(problem: ConvProblem) -> int:
    """Bytes of the float32 sum and of one part, a multiple of 256."""
    count = math.prod(problem.w_shape)
    return _rounded(4 * count) + _rounded(2 * count)


def engine_operands(problem: ConvProblem, operands: Operands) -> Operands:
    """Where the engine writes its part, and the workspace left for it."""
    part = operands.workspace + _rounded(4 * math.prod(problem.w_shape))
    used = scratch(problem)
    return Operands(
        a=operands.a,
        b=operands.b,
        out=part,
        workspace=operands.workspace + used,
        nbytes=operands.nbytes - used,
    )


def add_launch(
    problem: ConvProblem, operands: Operands, *, first: bool, accumulate: bool
) -> Launch:
    """Add the part to the sum and write the sum, rounded, to the gradient.

    Args:
        problem: Of the micro-batch.
        operands: Of the whole algorithm, not of its engine.
        first: Whether the sum starts here.
        accumulate: Whether it starts from what the gradient holds.
    """
    count = math.prod(problem.w_shape)
    blocks = min(_MOST_BLOCKS, -(-count // _THREADS))
    part = operands.workspace + _rounded(4 * count)

    def launch(handle: int, *arguments: Any) -> int:
        try:
            _kernel(problem.dtype)((blocks,), (_THREADS,), arguments)
        except Exception as e:  # of CuPy: to compile, to load or to launch
            raise BackendError(
                with_remedy(f"sum_{problem.dtype} cannot be launched: {e}")
            ) from e
        return 0

    import numpy as np

    arguments = (
        np.uint64(part),
        np.uint64(operands.workspace),
        np.uint64(operands.out),
        np.int64(count),
        np.int32(first),
        np.int32(accumulate),
    )
    return Launch(launch, arguments, f"sum_{problem.dtype}")


@functools.cache
def _kernel(dtype: str) -> Any:
    import cupy

    return cupy.RawKernel(SOURCE, f"sum_{dtype}")


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
