"""Sums over samples and pixels, one for each channel, in a fixed order.

A block takes one channel or, where images are small, 32 neighbouring ones; and a part
of its samples and pixels, so that there are blocks enough. Each leaves a sum in double
precision in the workspace, as (parts, C); whoever needs the total adds the parts up.
Where channels are last in memory a thread has the neighbours that one access of 16
bytes holds, and a block rows of 128 bytes. There are many short parts then: whichever
block comes last adds up those of its channels, in the order of the blocks.

Parts depend on shapes alone (see `channels`) and no number is added atomically: results
are reproducible.
"""

import math

from mucudnn.backends.cuda.kernels.program import THREADS

__all__ = [
    "CHANNELS",
    "FINISH",
    "LANES",
    "LAST_BLOCK",
    "PARTIALS",
    "REDUCE",
    "ROW",
    "partials",
]

LANES = 32
"""Neighbouring channels of a block, where images are small."""

ROW = 8
"""Threads that read neighbours where channels are last: 128 bytes."""

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
    f"#define MOST_WIDTH {ROW}  // threads beside each other where channels are last\n"
    + REDUCE
    + r"""
// The compiler is not to know what a number has to do with others.
__device__ void forget(int& number) { asm volatile("" : "+r"(number)); }
__device__ void forget(long long& number) { asm volatile("" : "+l"(number)); }

// Where a thread is: an element, its sample, and its place in the part of a channel.
struct Element { I i, n, k; };

// What some tensors hold at W neighbours; nothing of one that is missing.
template <int W, int TENSORS> struct Found {
    Pack<T, W> of[TENSORS];
    template <class... From> __device__ void read(I i, const From*... from) {
        const T* all[] = {from...};
        for (int j = 0; j < TENSORS; ++j)
            if (all[j]) of[j] = load<W>(all[j] + i);
    }
};
// An array of as many bytes as there are tensors.
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
    // Calls `body` for each W neighbours of the thread, with what `from` hold there;
    // only its start divides. Several are read before the first is used, even where
    // results are written in between, so that memory is not waited for one by one.
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
    // The same for at most MOST times, which are numbered as the compiler unrolls them.
    // All places together would take too many registers to be kept for the next call.
    template <int W, int MOST, class F> __device__ void few(const F& body) const {
        Steps at(*this, W);
        forget(at.k), forget(at.i), forget(at.s);
#pragma unroll
        for (int turn = 0; turn < MOST; ++turn) {
            if (at.k < stop) body(at.place(*this), turn);
            at.next(*this);
        }
    }
    // The first of its channels, or of any where it has none.
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
// What all threads of a block have found of their channels is left by some of them:
// added as `lane_sum` adds, and all channels between the same barriers.
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
// Elements `at` of CH channels: W at once, where the tensors that are named allow it,
// of which element j is of channel OF(j); `found` is what those in brackets hold there.
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
// The same by the threads of a lane, who read side by side and all get it.
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
    // All parts, past caches that do not see what other blocks have written; many are
    // read before the first is added, as the other blocks have nothing to do meanwhile.
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
    // They become the first.
    __device__ void merge(double* parts) const {
        double found = sum(parts);
        if (leads()) parts[c] = found;
    }
};
"""
"""What adds parts up where they are, by the block that comes last."""


def partials(count: int) -> int:
    """Blocks of a sum over `count` things, a block's thread taking at least one."""
    return max(1, min(PARTIALS, math.ceil(count / THREADS)))
