#include "prelude.cuh"
#include "channels.cuh"
#include "last_block.cuh"
#include "normed.cuh"

// How a ReLU masks a gradient: not at all; by its result, if given, and the masked
// gradient is stored as the term's; by recomputing the formula; or as arguments imply.
enum Passing { ALL, RESULT, FORMULA, ANY };

template <int CH, Passing BY> struct Gradient {
    T* dterm;
    NormedOf<CH> normed;
    bool result, formula;
    // Masks dy, given x, dy and the result at W neighbours.
    template <int W> __device__ void pass(const Found<W, 3>& found, A* passed) const {
        for (int j = 0; j < W; ++j) {
            A d = (A)found.of[1].at[j];
            if (BY == RESULT || (BY == ANY && result))
                d = (A)found.of[2].at[j] == 0 ? (A)0 : d;
            if (BY == FORMULA || (BY == ANY && formula))
                d = normed.of[OF(j)].masked(found.of[0].at[j], d);
            passed[j] = d;
        }
    }
    // Also adds to the sums, stores the term's gradient, and returns the masked one.
    template <int W>
    __device__ Pack<T, W> count(I i, const Found<W, 3>& found, Tally<CH>& sums,
                                Tally<CH>& dots) const {
        A passed[W];
        pass<W>(found, passed);
        Pack<T, W> narrow;
        for (int j = 0; j < W; ++j) {
            sums.add(j, passed[j]);
            A deviation = (A)found.of[0].at[j] - normed.of[OF(j)].centre;
            dots.add(j, deviation * passed[j]);
            narrow.at[j] = (T)passed[j];
        }
        if ((BY == RESULT || BY == ANY) && dterm) store(dterm + i, narrow);
        sums.added();
        dots.added();
        return narrow;
    }
};

#define BACKWARD                                                                  \
    const T *x, const T *dy, const T *y, const P *gamma, const P *beta,           \
        const P *mean, const P *inv_std, T *dterm

#define BACKWARD_GIVEN x, dy, y, gamma, beta, mean, inv_std, dterm
// One loop for each kind of mask, without a branch inside.
#define BY_PASSING(function, CH, ...)                                             \
    if (y) function<CH, RESULT>(__VA_ARGS__);                                     \
    else if (beta) function<CH, FORMULA>(__VA_ARGS__);                            \
    else function<CH, ALL>(__VA_ARGS__);

#define SHAPE I N, I C, I S, I width
template <int CH, Passing BY>
__device__ void dots_of(BACKWARD, double* sums, double* dots, SHAPE) {
    ChannelsOf<CH> channel(N, C, S, width);
    const T* result = BY == RESULT ? y : 0;
    const P* shift = BY == FORMULA ? beta : 0;
    NormedOf<CH> normed(channel.own(), gamma, shift, mean, inv_std);
    Gradient<CH, BY> gradient{dterm, normed, result, shift};
    Tally<CH> ones, products;
    bool packed = aligned(x) && aligned(dy) && aligned(y) && aligned(dterm);
    EACH_PACK(channel, packed, (x, dy, result), {
        gradient.template count<W>(at.i, found, ones, products);
    })
    leave_sums(channel, ones, sums, width);
    leave_sums(channel, products, dots, width);
}

KERNEL channel_dots(BACKWARD, double* sums, double* dots, SHAPE) {
    BY_PASSING(dots_of, 1, BACKWARD_GIVEN, sums, dots, N, C, S, width)
}

KERNEL channel_dots_last(BACKWARD, double* sums, double* dots, long long* arrived,
                         SHAPE) {
    BY_PASSING(dots_of, PACKED, BACKWARD_GIVEN, sums, dots, N, C, S, width)
    if (!is_last(arrived)) return;
    Gathering<PACKED> all(C, width);
    all.merge(sums);
    all.merge(dots);
}

#define RESULTS                                                                   \
    T *dx, P *dgamma, P *dbeta, const double *sums, const double *dots, I parts, I N, \
        I C, I S, I width
// The ReLU's result is not read again: dy is the masked gradient that was stored.
template <int CH, Passing BY> __device__ void input_grad(BACKWARD, RESULTS) {
    ChannelsOf<CH> channel(N, C, S, width);
    // Each thread computes the coefficients of one channel for all threads; partial
    // sums that are not merged yet are added by all of them.
    __shared__ InputGrad all[CH == 1 ? 32 : CH * MOST_WIDTH];
    I own = threadIdx.x, c = (I)blockIdx.x * width * CH + own;
    double sum = 0, dot = 0;
    if (CH == 1) {
        sum = lane_total(sums, parts, C, channel.c, width);
        dot = lane_total(dots, parts, C, channel.c, width);
    }
    if (own < width * CH && c < C) {
        if (CH > 1) sum = total(sums, parts, C, c), dot = total(dots, parts, C, c);
        all[own] = InputGrad(mean[c], inv_std[c], gamma[c], sum, dot, (double)N * S);
        if (blockIdx.y == 0) {
            dgamma[c] = (P)(dot * (double)inv_std[c]);
            dbeta[c] = (P)sum;
        }
    }
    __syncthreads();
    InputGrad grad[CH];
    Gradient<CH, BY> gradient;
    for (int j = 0; j < CH; ++j) {
        grad[j] = all[threadIdx.x % width * CH + j];
        A shift = BY == FORMULA ? (A)beta[channel.own() + j] : (A)0;
        gradient.normed.of[j] = Normed(grad[j].centre, grad[j].scale, shift);
    }
    const T* none = 0;
    EACH_PACK(channel, aligned(x) && aligned(dx) && aligned(dy), (x, dy, none), {
        Pack<T, W> v = found.of[0];
        A passed[W];
        gradient.template pass<W>(found, passed);
        for (int j = 0; j < W; ++j) v.at[j] = (T)grad[OF(j)](v.at[j], passed[j]);
        store(dx + at.i, v);
    })
}
#define GIVEN BACKWARD_GIVEN, dx, dgamma, dbeta, sums, dots, parts, N, C, S, width

KERNEL batch_norm_grad(BACKWARD, RESULTS) {
    if (beta) input_grad<1, FORMULA>(GIVEN);
    else input_grad<1, ALL>(GIVEN);
}

KERNEL batch_norm_grad_last(BACKWARD, RESULTS) {
    if (beta) input_grad<PACKED, FORMULA>(GIVEN);
    else input_grad<PACKED, ALL>(GIVEN);
}

#define WHOLE BACKWARD, T *dx, P *dgamma, P *dbeta, I N, I C, I S
template <int W, Passing BY>
__device__ void whole_grad(WHOLE, const Channel& channel, T* room) {
    I c = channel.c;
    const T* result = BY == RESULT || BY == ANY ? y : 0;
    const P* shift = BY == FORMULA || BY == ANY ? beta : 0;
    NormedOf<1> normed(c, gamma, shift, mean, inv_std);
    Gradient<1, BY> gradient{dterm, normed, result, shift};
    Pack<T, W> kept[HELD / W];
    Tally<1> ones, products;
    channel.template few<W, HELD / W>([&](const Element& at, int turn) {
        Found<W, 3> found;
        found.read(at.i, x, dy, result);
        store(room + at.k, found.of[0]);
        kept[turn] = gradient.template count<W>(at.i, found, ones, products);
    });
    double sum = lane_sum(ones.far[0], 1), dot = lane_sum(products.far[0], 1);
    InputGrad grad(mean[c], inv_std[c], gamma[c], sum, dot, (double)N * S);
    channel.template few<W, HELD / W>([&](const Element& at, int turn) {
        Pack<T, W> v = load<W>(room + at.k);
        for (int j = 0; j < W; ++j) v.at[j] = (T)grad(v.at[j], (A)kept[turn].at[j]);
        store(dx + at.i, v);
    });
    if (!channel.first()) return;
    dgamma[c] = (P)(dot * (double)inv_std[c]);
    dbeta[c] = (P)sum;
}

KERNEL batch_norm_grad_whole(WHOLE) {
    alignas(16) __shared__ T room[ROOM];
    Channel channel(N, C, S, 1);
    bool packed = channel.packs && aligned(x) && aligned(dx) && aligned(dy) &&
                  aligned(y) && aligned(dterm);
#define WHOLE_GIVEN BACKWARD_GIVEN, dx, dgamma, dbeta, N, C, S, channel, room
    if (packed) { BY_PASSING(whole_grad, PACKED, WHOLE_GIVEN) }
    else whole_grad<1, ANY>(WHOLE_GIVEN);  // long enough once
}
