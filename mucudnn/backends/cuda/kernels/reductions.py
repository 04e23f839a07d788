"""Bias, channel sums in a fixed order, and matrix products.

A block takes one channel or, where images are small, 32 neighbouring ones, and a part
of their samples and pixels, so that there are enough blocks. Each writes a sum in
double precision to the workspace, as (parts, C); the reader adds up the parts. With
channels last, a thread has the neighbours of one 16-byte access, and a block rows of
128 bytes. There are many short parts then: the last block to finish adds up those of
its channels, in the order of the blocks.

Parts depend on shapes alone (see `channels`) and no number is added atomically: results
are reproducible.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.backends.cuda.kernels.launch import KernelCall, Operation, Specs, as_ncs
from mucudnn.backends.cuda.kernels.source import THREADS, Program
from mucudnn.ir.tensor import TensorSpec, itemsize

LANES = 32
"""Neighbouring channels of a block, where images are small."""


ROW = 8
"""Threads that read neighbours with channels last: 128 bytes."""


PARTIALS = 512
"""Most blocks of a sum over everything."""


REDUCE = r"""
// Threads of one lane, threadIdx.x % width, share a result; width is a power of two.
// Warps add in registers; all threads of a lane add the warps' sums.
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
    f"#define MOST_WIDTH {ROW}  // threads beside each other where channels are last\n"
    + REDUCE
    + r"""
// Hides the origin of a number from the optimizer.
__device__ void forget(int& number) { asm volatile("" : "+r"(number)); }
__device__ void forget(long long& number) { asm volatile("" : "+l"(number)); }

// A thread's position: element, sample, and index within the part of a channel.
struct Element { I i, n, k; };

// Values of several tensors at W neighbours; none of a missing tensor.
template <int W, int TENSORS> struct Found {
    Pack<T, W> of[TENSORS];
    template <class... From> __device__ void read(I i, const From*... from) {
        const T* all[] = {from...};
        for (int j = 0; j < TENSORS; ++j)
            if (all[j]) of[j] = load<W>(all[j] + i);
    }
};
// Declared only: sizeof its result is the number of tensors.
template <class... From>
__device__ char (&counted(const From*... from))[sizeof...(From)];

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
    // Calls `body` for each W neighbours of the thread, with their values in `from`.
    // Only the start divides. Several reads are issued before the first is used, even
    // if results are written in between, to overlap the memory latencies.
    template <int W, class F, class... From>
    __device__ void each(const F& body, const From*... from) const {
        constexpr int AHEAD = sizeof...(From) > 1 ? 2 : 4;
        Steps at(*this, W);
        for (; at.k + (AHEAD - 1) * at.step < stop;) {
            Element places[AHEAD];
            Found<W, sizeof...(From)> found[AHEAD];
#pragma unroll
            for (int turn = 0; turn < AHEAD; ++turn, at.next(*this)) {
                places[turn] = at.place(*this);
                found[turn].read(places[turn].i, from...);
            }
#pragma unroll
            for (int turn = 0; turn < AHEAD; ++turn) body(places[turn], found[turn]);
        }
        for (; at.k < stop; at.next(*this)) {
            Element place = at.place(*this);
            Found<W, sizeof...(From)> found;
            found.read(place.i, from...);
            body(place, found);
        }
    }
    // The same for at most MOST turns, unrolled, so that their numbers are constants.
    // `forget` keeps the compiler from holding all positions in registers.
    template <int W, int MOST, class F> __device__ void few(const F& body) const {
        Steps at(*this, W);
        forget(at.k), forget(at.i), forget(at.s);
#pragma unroll
        for (int turn = 0; turn < MOST; ++turn) {
            if (at.k < stop) body(at.place(*this), turn);
            at.next(*this);
        }
    }
    // The first channel of the thread, or channel 0 if it has none.
    __device__ I own() const { return c < C ? c : 0; }
    __device__ bool first() const { return row == 0 && c < C; }
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

// Sums of a thread's channels: of a few numbers in A, of those in double precision.
template <int CH> struct Tally {
    A near[CH];
    double far[CH];
    int count;
    __device__ Tally() : count(0) {
        for (int j = 0; j < CH; ++j) near[j] = 0, far[j] = 0;
    }
    __device__ void add(int j, A value) { near[CH == 1 ? 0 : j] += value; }
    // Called after each W neighbours.
    __device__ void added() {
        if (CH == 1 || ++count % 16 == 0) settle();
    }
    __device__ void settle() {
        for (int j = 0; j < CH; ++j) far[j] += (double)near[j], near[j] = 0;
    }
};
// Adds the tallies of a block's threads as `lane_sum` does, with all channels between
// the same barriers, and writes the sums to `parts`.
template <int CH>
__device__ void leave_sums(const ChannelsOf<CH>& channel, Tally<CH>& tally,
                           double* parts, I width) {
    tally.settle();
    if constexpr (CH == 1) {
        double sum = lane_sum(tally.far[0], width);
        if (channel.first()) parts[(I)blockIdx.y * channel.C + channel.c] = sum;
    } else {
        __shared__ double sums[THREADS / 32][CH * MOST_WIDTH];
        I lane = threadIdx.x % 32, across = CH * width;
        for (int other = 16; other >= width; other /= 2)
            for (int j = 0; j < CH; ++j)
                tally.far[j] += __shfl_xor_sync(0xffffffffu, tally.far[j], other);
        __syncthreads();
        if (lane < width)
            for (int j = 0; j < CH; ++j)
                sums[threadIdx.x / 32][j * width + lane] = tally.far[j];
        __syncthreads();
        I own = threadIdx.x, c = (I)blockIdx.x * across + own;
        if (own >= across || c >= channel.C) return;
        double sum = 0;
        for (I warp = 0; warp < THREADS / 32; ++warp)
            sum += sums[warp][own % CH * width + own / CH];
        parts[(I)blockIdx.y * channel.C + c] = sum;
    }
}
// Loops over elements `at` of CH channels, W at once if `packed`; element j belongs to
// channel OF(j), and `found` holds the values of the tensors in parentheses.
#define OF(j) (CH == 1 ? 0 : (j))
#define LISTED(...) __VA_ARGS__
#define FOUND(tensors) Found<W, sizeof(counted(LISTED tensors))>
#define EACH_PACK(channel, packed, tensors, ...)                                  \
    if (CH > 1 || (channel.packs && (packed))) {                                  \
        constexpr int W = PACKED;                                                 \
        channel.template each<W>(                                                 \
            [&](const Element& at, const FOUND(tensors)& found) { __VA_ARGS__ },  \
            LISTED tensors);                                                      \
    } else if constexpr (CH == 1) {                                               \
        constexpr int W = 1;                                                      \
        channel.template each<W>(                                                 \
            [&](const Element& at, const FOUND(tensors)& found) { __VA_ARGS__ },  \
            LISTED tensors);                                                      \
    }

__device__ double total(const double* parts, I count, I C, I c) {
    double sum = 0;
    if (c >= C) return sum;
    for (I part = 0; part < count; ++part) sum += parts[part * C + c];
    return sum;
}
// The same by the threads of a lane, which read in parallel and all get the result.
__device__ double lane_total(const double* parts, I count, I C, I c, I width) {
    double sum = 0;
    if (c < C)
        for (I part = threadIdx.x / width; part < count; part += THREADS / width)
            sum += parts[part * C + c];
    return lane_sum(sum, width);
}
"""
)


FINISH = """
// A block has 32 channels.
KERNEL finish_channels(T* out, const double* parts, I count, I C) {
    I c = blockIdx.x * 32 + threadIdx.x % 32;
    double sum = lane_total(parts, count, C, c, 32);
    if (threadIdx.x < 32 && c < C) out[c] = (T)sum;
}
"""
"""Kernel that adds parts up into a tensor."""


LAST_BLOCK = """
// True in the last block of these channels to finish: all sums are written then.
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

// The channel whose parts a thread of the last block adds up, with other threads.
template <int CH> struct Gathering {
    I C, place, threads, c;
    __device__ Gathering(I C, I width)
        : C(C), place(threadIdx.x & (width * CH - 1)), threads(width * CH),
          c((I)blockIdx.x * threads + place) {}
    __device__ bool leads() const { return threadIdx.x < threads && c < C; }
    // Sums all parts, bypassing caches that are not coherent with other blocks' writes;
    // many reads are issued before the first addition to hide their latency.
    __device__ double sum(const double* parts) const {
        const int AHEAD = 16;
        double sum = 0;
        I step = THREADS / threads, last = c < C ? (I)gridDim.y : 0;
        for (I part = threadIdx.x / threads; part < last; part += AHEAD * step) {
            double read[AHEAD];
#pragma unroll
            for (int turn = 0; turn < AHEAD; ++turn)
                read[turn] = part + turn * step < last
                                 ? __ldcg(parts + (part + turn * step) * C + c)
                                 : 0;
#pragma unroll
            for (int turn = 0; turn < AHEAD; ++turn) sum += read[turn];
        }
        return lane_sum(sum, threads);
    }
    // Replaces the first part by the sum of all.
    __device__ void merge(double* parts) const {
        double found = sum(parts);
        if (leads()) parts[c] = found;
    }
};
"""
"""Device code with which the last block adds the parts up in place."""


def partials(count: int) -> int:
    """Return the blocks of a sum over `count` items; each thread has at least one."""
    return max(1, min(PARTIALS, math.ceil(count / THREADS)))


def bias(call: KernelCall) -> None:
    """Compute y = x + b, b of shape (C,) along axis 1."""
    _added(call, relu=False)


def bias_relu(call: KernelCall) -> None:
    """Compute max(x + b, 0)."""
    _added(call, relu=True)


def bias_relu_grad(call: KernelCall) -> None:
    """Compute dy where y is not 0, and its sum over samples and pixels."""
    (y, dy), (dx, db) = call.inputs, call.outputs
    _summed(call, "bias_relu_grad", (y, dy, dx), db)


def bias_grad(call: KernelCall) -> None:
    """Sum dy over samples and pixels."""
    dy, db = call.inputs[0], call.outputs[0]
    _summed(call, "bias_grad", (dy,), db)


def _one_sum(inputs: Specs, *_: object) -> int:
    return Channels.most_bytes(inputs[0])


def matmul(call: KernelCall) -> None:
    """Compute y = a b, with optional transpositions."""
    a, b = call.inputs
    a = a.T if call.attrs["transpose_a"] else a
    b = b.T if call.attrs["transpose_b"] else b
    call.gpu.matmul(a, b, call.outputs[0])


# Per-channel bias, and its gradient: sums over everything but channels.


PROGRAM = Program(
    CHANNELS
    + FINISH
    + LAST_BLOCK
    + r"""
#define SHAPE I N, I C, I S, I width
template <int CH>
__device__ void added(const T* x, const P* b, T* y, I relu, SHAPE) {
    ChannelsOf<CH> channel(N, C, S, width);
    A more[CH];
    for (int j = 0; j < CH; ++j) more[j] = (A)b[channel.own() + j];
    EACH_PACK(channel, aligned(x) && aligned(y), (x), {
        Pack<T, W> v = found.of[0];
        for (int j = 0; j < W; ++j) {
            A sum = (A)v.at[j] + more[OF(j)];
            v.at[j] = (T)(!relu || sum > 0 || sum != sum ? sum : (A)0);
        }
        store(y + at.i, v);
    })
}

KERNEL bias(const T* x, const P* b, T* y, I relu, SHAPE) {
    added<1>(x, b, y, relu, N, C, S, width);
}

KERNEL bias_last(const T* x, const P* b, T* y, I relu, SHAPE) {
    added<PACKED>(x, b, y, relu, N, C, S, width);
}

// Sums dy; if y is given, only where y is not 0, and stores dx.
template <int CH>
__device__ void summed(const T* y, const T* dy, T* dx, double* parts, SHAPE) {
    ChannelsOf<CH> channel(N, C, S, width);
    Tally<CH> sums;
    EACH_PACK(channel, aligned(y) && aligned(dy) && aligned(dx), (dy, y), {
        Pack<T, W> d = found.of[0];
        for (int j = 0; j < W; ++j) {
            if (y && (A)found.of[1].at[j] == 0) d.at[j] = (T)(A)0;
            sums.add(j, (A)d.at[j]);
        }
        if (y) store(dx + at.i, d);
        sums.added();
    })
    leave_sums(channel, sums, parts, width);
}

KERNEL bias_relu_grad(const T* y, const T* dy, T* dx, double* parts, SHAPE) {
    summed<1>(y, dy, dx, parts, N, C, S, width);
}

// As `summed`; the last block adds the parts up.
__device__ void summed_last(const T* y, const T* dy, T* dx, P* db, double* parts,
                            long long* arrived, SHAPE) {
    summed<PACKED>(y, dy, dx, parts, N, C, S, width);
    if (!is_last(arrived)) return;
    Gathering<PACKED> all(C, width);
    double sum = all.sum(parts);
    if (all.leads()) db[all.c] = (P)sum;
}

KERNEL bias_relu_grad_last(const T* y, const T* dy, T* dx, P* db, double* parts,
                           long long* arrived, SHAPE) {
    summed_last(y, dy, dx, db, parts, arrived, N, C, S, width);
}

KERNEL bias_grad(const T* dy, double* parts, SHAPE) {
    summed<1>(0, dy, 0, parts, N, C, S, width);
}

KERNEL bias_grad_last(const T* dy, P* db, double* parts, long long* arrived, SHAPE) {
    summed_last(0, dy, 0, db, parts, arrived, N, C, S, width);
}
"""
)


def _summed(call: KernelCall, name: str, images: tuple[Any, ...], db: Any) -> None:
    channels = Channels.here(call, *images)
    (parts,) = channels.buffers(call.workspace, 1)
    shape, blocks = channels.arguments, channels.blocks
    if channels.apiece == 1:
        call.launch(PROGRAM, name, blocks, *images, parts, *shape)
        channels.finish(call, PROGRAM, parts, db)
        return
    arguments = *images, db, parts, *channels.arrived(call), *shape
    call.launch(PROGRAM, f"{name}_last", blocks, *arguments, beside=db)


def _added(call: KernelCall, *, relu: bool) -> None:
    (x, b), (y,) = call.inputs, call.outputs
    channels = Channels.here(call, x, y)
    arguments = x, b, y, int(relu), *channels.arguments
    name = channels.kernel("bias")
    call.launch(PROGRAM, name, channels.blocks, *arguments, beside=b)


# Division of per-channel sums over samples and pixels among blocks.
#
# The division depends on shapes alone, so results are bit-identical every time; see
# `sums` for the device code.


_BLOCKS = 1024

_MOST_PARTS = 64

_FEWEST = 8  # least elements per thread: with fewer, adding the parts costs more

_SMALL_IMAGE = 8  # elements; below, a row of an image is no full memory access

_ACCESS = 16  # bytes of a thread's memory access

_LAST_BLOCKS = 528  # channels last: four per multiprocessor of an H100

_MOST_LAST = 264  # channels last: most parts, which one block adds up

_SUMMED = 512  # least bytes of a channel per part (a sum of 8 bytes)


@dataclass(frozen=True)
class Channels:
    """Division of the sums over an array (N, C, S).

    A block has `width` times `apiece` channels, each of its threads `apiece`
    neighbouring ones; `parts` blocks share the same channels.
    """

    shape: tuple[int, int, int]
    width: int
    parts: int
    apiece: int = 1

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Channels":
        """Divide a tensor (N, C, *spatial) of any alignment."""
        N, C, S = as_ncs(shape)
        width = 1 if S >= _SMALL_IMAGE else LANES
        across = -(-C // width)
        worth = N * S // (THREADS // width * _FEWEST)
        parts = min(_MOST_PARTS, -(-_BLOCKS // max(1, across)), worth)
        return cls((N, C, S), width, max(1, parts))

    @classmethod
    def last(cls, shape: Sequence[int], nbytes: int) -> "Channels | None":
        """Divide channels-last items of `nbytes`; None unless accesses are whole."""
        N, C, S = as_ncs(shape)
        apiece = _ACCESS // nbytes
        if S != 1 or C == 0 or C % apiece:
            return None
        width = min(ROW, 1 << (C // apiece - 1).bit_length())
        across = -(-C // (width * apiece))
        worth = N * nbytes // _SUMMED
        parts = min(_MOST_LAST, -(-_LAST_BLOCKS // across), worth)
        return cls((N, C, S), width, max(1, parts), apiece)

    @classmethod
    def here(cls, call: KernelCall, *images: Any) -> "Channels":
        """Divide images of one shape by their alignment; None is a missing image."""
        shape, nbytes = images[0].shape, images[0].dtype.itemsize
        found = cls.last(shape, nbytes)
        starts = (call.gpu.address(image) for image in images if image is not None)
        if found is None or any(start % _ACCESS for start in starts):
            return cls.of(shape)
        return found

    @classmethod
    def most_bytes(cls, spec: TensorSpec) -> int:
        """Return the most bytes of a tensor's partial sums, for any alignment."""
        other = cls.last(spec.shape, itemsize(spec.dtype))
        return max(cls.of(spec.shape).nbytes, other.nbytes if other else 0)

    @property
    def blocks(self) -> tuple[int, int]:
        """Grid of a kernel that constructs a `ChannelsOf`."""
        return -(-self.shape[1] // (self.width * self.apiece)), self.parts

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """N, C, S, width: constructor arguments of a `ChannelsOf`."""
        return (*self.shape, self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of the partial sums."""
        return 8 * self.parts * self.shape[1]

    def kernel(self, name: str) -> str:
        """Return the name of the kernel variant for this division."""
        return name if self.apiece == 1 else f"{name}_last"

    def finish(self, call: KernelCall, program: Program, parts: Any, out: Any) -> None:
        """Add up the parts into `out`; the program must include `FINISH`."""
        arguments = out, parts, self.parts, out.size
        blocks = (-(-out.size // LANES),)
        call.launch(program, "finish_channels", blocks, *arguments)

    @property
    def left(self) -> int:
        """Parts that remain after a launch whose last block has merged them."""
        return self.parts if self.apiece == 1 else 1

    def arrived(self, call: KernelCall) -> tuple[Any, ...]:
        """Return the counters of a kernel whose last block adds up, or nothing."""
        if self.apiece == 1:
            return ()
        return (call.gpu.table([[0] * self.blocks[0]]),)

    def buffers(self, workspace: Any, count: int) -> list[Any]:
        """Return the first `count` buffers of partial sums in a workspace."""
        size = self.nbytes
        return [workspace[i * size : (i + 1) * size] for i in range(count)]


OPERATIONS: dict[str, Operation] = {
    "bias": Operation(bias),
    "bias_grad": Operation(bias_grad, _one_sum),
    "bias_relu": Operation(bias_relu),
    "bias_relu_grad": Operation(bias_relu_grad, _one_sum),
    "matmul": Operation(matmul),
}
