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
// Threads of one lane, threadIdx.x % width, share a result; width is a power of two.
// Warps add in registers; what they leave is added by all who want it.
__device__ double lane_sum(double value, I width) {
    __shared__ double sums[THREADS];
    I place = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int other = 16; other >= width; other /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, other);
    I lanes = width < 32 ? width : 32;
    __syncthreads();
    if (place < lanes) sums[warp * lanes + place] = value;
    __syncthreads();
    I left = width < 32 ? THREADS / 32 : THREADS / width;
    double sum = 0;
    for (I each = 0; each < left; ++each)
        sum += sums[each * width + (threadIdx.x & (width - 1))];
    return sum;
}
"""

CHANNELS = (
    REDUCE
    + r"""
// Where a thread is: an element, its sample, and its place in the part of a channel.
struct Element { I i, n, k; };

// The part of a channel that a block has, and a thread's elements in it.
struct Channel {
    I C, S, c, start, stop, row, rows;
    bool packs;
    __device__ Channel(I N, I C, I S, I width)
        : C(C), S(S), row(threadIdx.x / width), rows(THREADS / width),
          packs(width == 1 && S % PACKED == 0) {
        c = (I)blockIdx.x * width + threadIdx.x % width;
        I length = (N * S + gridDim.y - 1) / gridDim.y;
        length = (length + PACKED - 1) / PACKED * PACKED;
        start = blockIdx.y * length;
        stop = c >= C ? start : start + length < N * S ? start + length : N * S;
    }
    // Calls `body` for each W neighbours of the thread; only its start divides.
    template <int W, class F> __device__ void each(const F& body) const {
        for (Steps at(*this, W); at.k < stop; at.next(*this))
            body(at.place(*this));
    }
    // The same for at most MOST times, which are numbered as the compiler unrolls them.
    template <int W, int MOST, class F> __device__ void few(const F& body) const {
        Steps at(*this, W);
#pragma unroll
        for (int turn = 0; turn < MOST; ++turn) {
            if (at.k < stop) body(at.place(*this), turn);
            at.next(*this);
        }
    }
    __device__ bool first() const { return row == 0 && c < C; }
    __device__ void leave(double* parts, double sum) const {
        if (first()) parts[(I)blockIdx.y * C + c] = sum;
    }
    struct Steps {
        I k, s, n, i, step, samples, pixels, jump;
        __device__ Steps(const Channel& of, I W)
            : k(of.start + of.row * W), s(k % of.S), n(k / of.S),
              i((n * of.C + of.c) * of.S + s), step(of.rows * W),
              samples(step / of.S), pixels(step % of.S),
              jump(samples * of.C * of.S + pixels) {}
        __device__ Element place(const Channel& of) const {
            return Element{i, n, k - of.start};
        }
        __device__ void next(const Channel& of) {
            k += step;
            i += jump;
            n += samples;
            s += pixels;
            if (s < of.S) return;
            s -= of.S;
            i += (of.C - 1) * of.S;
            ++n;
        }
    };
};
// Elements `at` of a channel: W at once, where the tensors that are named allow it.
#define EACH_PACK(channel, packed, ...)                                           \
    if (channel.packs && (packed)) {                                              \
        constexpr int W = PACKED;                                                 \
        channel.template each<W>([&](const Element& at) { __VA_ARGS__ });         \
    } else {                                                                      \
        constexpr int W = 1;                                                      \
        channel.template each<W>([&](const Element& at) { __VA_ARGS__ });         \
    }

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
