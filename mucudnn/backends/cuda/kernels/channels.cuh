#define MOST_WIDTH 8  // threads beside each other where channels are last
#include "reduce.cuh"

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
