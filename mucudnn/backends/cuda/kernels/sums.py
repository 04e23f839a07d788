"""Sums over samples and pixels, one for each channel, in a fixed order.

A block takes one channel or, where images are small, 32 neighbouring ones; and a part
of its samples and pixels, so that there are blocks enough. Each leaves a sum in double
precision in the workspace, as (parts, C); whoever needs the total adds the parts up.
Where channels are last in memory a thread has the neighbours that one access of 16
bytes holds, and a block rows of 128 bytes. There are many short parts then: whichever
block comes last adds up those of its channels, in the order of the blocks.

Parts depend on shapes alone and no number is added atomically: results are
reproducible.
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
)
from mucudnn.ir.tensor import TensorSpec, itemsize

__all__ = [
    "CHANNELS",
    "FINISH",
    "LAST_BLOCK",
    "PARTIALS",
    "REDUCE",
    "Channels",
    "partials",
]

_BLOCKS = 1024
_MOST_PARTS = 64
_FEWEST = 8  # elements of a thread, or the parts are not worth their addition
_LANES = 32
_SMALL_IMAGE = 8  # elements: below, a row of an image is no full access to memory
_ACCESS = 16  # bytes of a thread's access to memory
_ROW = 8  # threads that read neighbours where channels are last: 128 bytes
_MOST_LAST = 512  # parts where channels are last, which one block adds up
_SUMMED = 512  # bytes of a channel at least, of which a part is a sum of 8 bytes

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

// The part of a channel that a block has, and a thread's elements in it; or of CH
// neighbouring channels that are last in memory.
template <int CH> struct ChannelsOf {
    I C, S, c, start, stop, row, rows;
    bool packs;
    __device__ ChannelsOf(I N, I C, I S, I width)
        : C(C), S(S), row(threadIdx.x / width), rows(THREADS / width),
          packs(width == 1 && S % PACKED == 0) {
        c = ((I)blockIdx.x * width + threadIdx.x % width) * CH;
        I length = (N * S + gridDim.y - 1) / gridDim.y;
        if (CH == 1) length = (length + PACKED - 1) / PACKED * PACKED;
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
    // The first of its channels, or of any where it has none.
    __device__ I own() const { return c < C ? c : 0; }
    __device__ bool first() const { return row == 0 && c < C; }
    __device__ void leave(double* parts, int j, double sum) const {
        if (first()) parts[(I)blockIdx.y * C + c + j] = sum;
    }
    struct Steps {
        I k, s, n, i, step, samples, pixels, jump;
        __device__ Steps(const ChannelsOf& of, I W)
            : k(of.start + of.row * (W / CH)), s(CH == 1 ? k % of.S : 0),
              n(CH == 1 ? k / of.S : k), i((n * of.C + of.c) * of.S + s),
              step(of.rows * (W / CH)), samples(CH == 1 ? step / of.S : step),
              pixels(CH == 1 ? step % of.S : 0),
              jump(samples * of.C * of.S + pixels) {}
        __device__ Element place(const ChannelsOf& of) const {
            return Element{i, n, k - of.start};
        }
        __device__ void next(const ChannelsOf& of) {
            k += step;
            i += jump;
            n += samples;
            if (CH > 1) return;
            s += pixels;
            if (s < of.S) return;
            s -= of.S;
            i += (of.C - 1) * of.S;
            ++n;
        }
    };
};
typedef ChannelsOf<1> Channel;

// Sums of a thread's channels; of a few numbers in A, then in double precision.
template <int CH> struct Tally {
    A near[CH];
    double far[CH];
    int count;
    __device__ Tally() : count(0) {
        for (int j = 0; j < CH; ++j) near[j] = 0, far[j] = 0;
    }
    __device__ void add(int j, A value) { near[CH == 1 ? 0 : j] += value; }
    // After each W neighbours.
    __device__ void added() {
        if (CH == 1 || ++count % 16 == 0) settle();
    }
    __device__ void settle() {
        for (int j = 0; j < CH; ++j) far[j] += (double)near[j], near[j] = 0;
    }
};
// What all threads of a block have found of a channel is left by one of them.
template <int CH>
__device__ void leave_sums(const ChannelsOf<CH>& channel, Tally<CH>& tally,
                           double* parts, I width) {
    tally.settle();
    for (int j = 0; j < CH; ++j)
        channel.leave(parts, j, lane_sum(tally.far[j], width));
}
// Elements `at` of CH channels: W at once, where the tensors that are named allow it,
// of which element j is of channel OF(j).
#define OF(j) (CH == 1 ? 0 : (j))
#define EACH_PACK(channel, packed, ...)                                           \
    if (CH > 1 || (channel.packs && (packed))) {                                  \
        constexpr int W = PACKED;                                                 \
        channel.template each<W>([&](const Element& at) { __VA_ARGS__ });         \
    } else if constexpr (CH == 1) {                                               \
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

FINISH = """
// The same by threads that share it; a block has 32 channels.
__device__ double shared_total(const double* parts, I count, I C, I c) {
    double sum = 0;
    if (c < C)
        for (I part = threadIdx.x / 32; part < count; part += THREADS / 32)
            sum += parts[part * C + c];
    return lane_sum(sum, 32);
}

KERNEL finish_channels(T* out, const double* parts, I count, I C) {
    I c = blockIdx.x * 32 + threadIdx.x % 32;
    double sum = shared_total(parts, count, C, c);
    if (threadIdx.x < 32 && c < C) out[c] = (T)sum;
}
"""
"""What adds parts up into a tensor."""

LAST_BLOCK = """
// Whether all other blocks with these channels have left their sums; one is told so.
// Counters, one for each place along x, are 0 before and after.
__device__ bool is_last(long long* arrived) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned long long* count = (unsigned long long*)arrived + blockIdx.x;
        last = atomicAdd(count, 1ull) == gridDim.y - 1;
        if (last) *count = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// The channel that a thread of the last block adds up with others, CH a place.
template <int CH> struct Gathering {
    I C, place, threads, c;
    __device__ Gathering(I C, I width)
        : C(C), place(threadIdx.x & (width * CH - 1)), threads(width * CH),
          c((I)blockIdx.x * threads + place) {}
    __device__ bool leads() const { return threadIdx.x < threads && c < C; }
    // All parts, past caches that do not see what other blocks have written.
    __device__ double sum(const double* parts) const {
        double sum = 0;
        I step = THREADS / threads, last = c < C ? (I)gridDim.y : 0;
#pragma unroll 8
        for (I part = threadIdx.x / threads; part < last; part += step)
            sum += __ldcg(parts + part * C + c);
        return lane_sum(sum, threads);
    }
    // They become the first.
    __device__ void merge(double* parts) const {
        double found = sum(parts);
        if (leads()) parts[c] = found;
    }
};
"""
"""What adds parts up where they are, by the block that comes last."""


@dataclass(frozen=True)
class Channels:
    """How the sums over an array (N, C, S) are divided.

    A block has `width` times `apiece` channels, each of its threads `apiece`
    neighbouring ones; `parts` blocks have the same ones.
    """

    shape: tuple[int, int, int]
    width: int
    parts: int
    apiece: int = 1

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Channels":
        """How to divide a tensor (N, C, *spatial) that may begin anywhere."""
        N, C, S = as_ncs(shape)
        width = 1 if S >= _SMALL_IMAGE else _LANES
        across = -(-C // width)
        worth = N * S // (THREADS // width * _FEWEST)
        parts = min(_MOST_PARTS, -(-_BLOCKS // max(1, across)), worth)
        return cls((N, C, S), width, max(1, parts))

    @classmethod
    def last(cls, shape: Sequence[int], nbytes: int) -> "Channels | None":
        """How, where channels of so many bytes are last and fill whole accesses."""
        N, C, S = as_ncs(shape)
        apiece = _ACCESS // nbytes
        if S != 1 or C == 0 or C % apiece:
            return None
        width = min(_ROW, 1 << (C // apiece - 1).bit_length())
        across = -(-C // (width * apiece))
        worth = N * nbytes // _SUMMED
        parts = min(_MOST_LAST, -(-_BLOCKS // across), worth)
        return cls((N, C, S), width, max(1, parts), apiece)

    @classmethod
    def here(cls, call: KernelCall, *images: Any) -> "Channels":
        """How to divide the first of these, all of one shape; None is a missing one."""
        shape, nbytes = images[0].shape, images[0].dtype.itemsize
        found = cls.last(shape, nbytes)
        starts = (call.gpu.address(image) for image in images if image is not None)
        if found is None or any(start % _ACCESS for start in starts):
            return cls.of(shape)
        return found

    @classmethod
    def most_bytes(cls, spec: TensorSpec) -> int:
        """Bytes of the partial sums of a tensor, wherever it begins."""
        other = cls.last(spec.shape, itemsize(spec.dtype))
        return max(cls.of(spec.shape).nbytes, other.nbytes if other else 0)

    @property
    def blocks(self) -> tuple[int, int]:
        """The grid of a kernel that makes a `ChannelsOf`."""
        return -(-self.shape[1] // (self.width * self.apiece)), self.parts

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """N, C, S, width: what a `ChannelsOf` is made of."""
        return (*self.shape, self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of the partial sums."""
        return 8 * self.parts * self.shape[1]

    def kernel(self, name: str) -> str:
        """The kernel of this name for channels that are divided so."""
        return name if self.apiece == 1 else f"{name}_last"

    def finish(self, call: KernelCall, program: Program, parts: Any, out: Any) -> None:
        """Add the parts up; the program has `FINISH`."""
        arguments = out, parts, self.parts, out.size
        blocks = (-(-out.size // _LANES),)
        call.launch(program, "finish_channels", blocks, *arguments)

    @property
    def left(self) -> int:
        """Parts to be added up behind a launch whose last block has merged them."""
        return self.parts if self.apiece == 1 else 1

    def arrived(self, call: KernelCall) -> tuple[Any, ...]:
        """The counters of a kernel whose last block adds up; nothing if none does."""
        if self.apiece == 1:
            return ()
        return (call.gpu.table([[0] * self.blocks[0]]),)

    def buffers(self, workspace: Any, count: int) -> list[Any]:
        """The first parts of a workspace, one for each of `count` sums."""
        size = self.nbytes
        return [workspace[i * size : (i + 1) * size] for i in range(count)]


def partials(count: int) -> int:
    """Blocks of a sum over `count` things, a block's thread taking at least one."""
    return max(1, min(PARTIALS, math.ceil(count / THREADS)))
