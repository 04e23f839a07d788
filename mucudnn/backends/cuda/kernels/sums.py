"""Sums over samples and pixels, one for each channel, in a fixed order.

A block takes one channel or, where images are small, 32 neighbouring ones; and a part
of its samples and pixels, so that there are blocks enough. Each leaves a sum in double
precision in the workspace, as (parts, C); whoever needs the total adds the parts up.
Parts depend on shapes alone and nothing is added atomically: results are reproducible.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.backends.cuda.kernels.program import (
    THREADS,
    KernelCall,
    Program,
    as_ncs,
    flat,
)

__all__ = ["CHANNELS", "FINISH", "PARTIALS", "REDUCE", "Channels", "partials"]

_BLOCKS = 1024
_MOST_PARTS = 64
_FEWEST = 8  # elements of a thread, or the parts are not worth their addition
_LANES = 32
_SMALL_IMAGE = 8  # elements: below, a row of an image is no full access to memory

PARTIALS = 512
"""Most blocks of a sum over everything."""

REDUCE = r"""
// Threads of one lane, threadIdx.x % width, share a result; width is a power of two up
// to 32. Warps add in registers; what they leave is added by all who want it.
__device__ double lane_sum(double value, I width) {
    __shared__ double sums[THREADS];
    I place = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int other = 16; other >= width; other /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, other);
    __syncthreads();
    if (place < width) sums[warp * width + place] = value;
    __syncthreads();
    double sum = 0;
    for (I each = 0; each < THREADS / 32; ++each)
        sum += sums[each * width + threadIdx.x % width];
    return sum;
}
"""

CHANNELS = (
    REDUCE
    + r"""
// The part of a channel that a block has, and a thread's elements in it.
struct Channel {
    I C, S, c, k, stop, step, row;
    __device__ Channel(I N, I C, I S, I width)
        : C(C), S(S), step(THREADS / width), row(threadIdx.x / width) {
        c = (I)blockIdx.x * width + threadIdx.x % width;
        I length = (N * S + gridDim.y - 1) / gridDim.y;
        I start = blockIdx.y * length;
        k = start + row;
        stop = c >= C ? k : start + length < N * S ? start + length : N * S;
    }
    __device__ I at(I k) const { return (k / S * C + c) * S + k % S; }
    __device__ bool first() const { return row == 0 && c < C; }
    __device__ void leave(double* parts, double sum) const {
        if (first()) parts[(I)blockIdx.y * C + c] = sum;
    }
};
#define EACH_OF(channel, i)                                                       \
    for (I k = channel.k, i; k < channel.stop && (i = channel.at(k), true);       \
         k += channel.step)

__device__ double total(const double* parts, I count, I C, I c) {
    double sum = 0;
    if (c >= C) return sum;
    for (I part = 0; part < count; ++part) sum += parts[part * C + c];
    return sum;
}
"""
)

FINISH = r"""
KERNEL finish_channels(T* out, const double* parts, I count, I C) {
    EACH(c, C) out[c] = (T)total(parts, count, C, c);
}
"""


@dataclass(frozen=True)
class Channels:
    """How the sums over an array (N, C, S) are divided.

    A block has `width` channels; `parts` blocks have the same ones.
    """

    shape: tuple[int, int, int]
    width: int
    parts: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Channels":
        """How to divide a tensor (N, C, *spatial)."""
        N, C, S = as_ncs(shape)
        width = 1 if S >= _SMALL_IMAGE else _LANES
        across = -(-C // width)
        worth = N * S // (THREADS // width * _FEWEST)
        parts = min(_MOST_PARTS, -(-_BLOCKS // max(1, across)), worth)
        return cls((N, C, S), width, max(1, parts))

    @property
    def blocks(self) -> tuple[int, int]:
        """The grid of a kernel that makes a `Channel`."""
        return -(-self.shape[1] // self.width), self.parts

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """N, C, S, width: what a `Channel` is made of."""
        return (*self.shape, self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of the partial sums."""
        return 8 * self.parts * self.shape[1]

    def finish(self, call: KernelCall, program: Program, parts: Any, out: Any) -> None:
        """Add the parts up; the program has `FINISH`."""
        arguments = out, parts, self.parts, out.size
        call.launch(program, "finish_channels", flat(out.size), *arguments)

    def buffers(self, workspace: Any, count: int) -> list[Any]:
        """The first parts of a workspace, one for each of `count` sums."""
        size = self.nbytes
        return [workspace[i * size : (i + 1) * size] for i in range(count)]


def partials(count: int) -> int:
    """Blocks of a sum over `count` things, a block's thread taking at least one."""
    return max(1, min(PARTIALS, math.ceil(count / THREADS)))
