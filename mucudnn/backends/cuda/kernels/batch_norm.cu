#include "prelude.cuh"
#include "channels.cuh"
#include "last_block.cuh"
#include "normed.cuh"

// Deviations are from a channel's first element, so that little cancels.
template <bool KEEP, int CH> struct MomentSums {
    A origin[CH];
    Tally<CH> sums, squares;
    __device__ MomentSums(const ChannelsOf<CH>& channel, const T* x, T* room) {
        for (int j = 0; j < CH; ++j) origin[j] = (A)x[(channel.own() + j) * channel.S];
        EACH_PACK(channel, aligned(x), (x), {
            Pack<T, W> v = found.of[0];
            if (KEEP) store(room + at.k, v);
            for (int j = 0; j < W; ++j) {
                A deviation = (A)v.at[j] - origin[OF(j)];
                sums.add(j, deviation);
                squares.add(j, deviation * deviation);
            }
            sums.added();
            squares.added();
        })
    }
};

template <int CH>
__device__ void leave_moments(const T* x, double* sums, double* squares, I N, I C, I S,
                              I width) {
    ChannelsOf<CH> channel(N, C, S, width);
    MomentSums<false, CH> found(channel, x, 0);
    leave_sums(channel, found.sums, sums, width);
    leave_sums(channel, found.squares, squares, width);
}

#define FORWARD                                                                   \
    const T *x, const P *gamma, const P *beta, P *running_mean, P *running_var,   \
        const T *term, T *y, P *mean, P *inv_std
#define RULES double eps, double momentum, I update, I relu

template <bool KEPT, int CH>
__device__ void apply(const ChannelsOf<CH>& channel, const Normed* normed,
                      const T* room, const T* x, const T* term, T* y, bool relu) {
    const T* read = KEPT ? 0 : x;
    EACH_PACK(channel, aligned(x) && aligned(y) && aligned(term), (read, term), {
        Pack<T, W> v = KEPT ? load<W>(room + at.k) : found.of[0];
        for (int j = 0; j < W; ++j) {
            A value = normed[OF(j)](v.at[j]);
            if (term) value += (A)found.of[1].at[j];
            v.at[j] = (T)(relu ? positive(value) : value);
        }
        store(y + at.i, v);
    })
}

template <bool KEPT>
__device__ void normalise(const Channel& channel, const Moments& moments,
                          const T* room, FORWARD, RULES) {
    I c = channel.c;
    if (c >= channel.C) return;
    P centre = (P)moments.average, inverse = moments.inverse(eps);
    Normed normed(centre, inverse, gamma[c], beta[c]);
    apply<KEPT>(channel, &normed, room, x, term, y, relu);
    if (!channel.first() || blockIdx.y != 0) return;
    mean[c] = centre;
    inv_std[c] = inverse;
    if (update) moments.move(running_mean + c, running_var + c, momentum);
}

KERNEL channel_moments(const T* x, double* sums, double* squares, I N, I C, I S,
                       I width) {
    leave_moments<1>(x, sums, squares, N, C, S, width);
}

KERNEL channel_moments_last(const T* x, double* sums, double* squares,
                            long long* arrived, I N, I C, I S, I width) {
    leave_moments<PACKED>(x, sums, squares, N, C, S, width);
    if (!is_last(arrived)) return;
    Gathering<PACKED> all(C, width);
    all.merge(sums);
    all.merge(squares);
}

KERNEL batch_norm_statistics(const T* x, double* sums, double* squares,
                             long long* arrived, P* running_mean, P* running_var,
                             P* mean, P* inv_std, I N, I C, I S, I width, double eps,
                             double momentum, I update) {
    leave_moments<PACKED>(x, sums, squares, N, C, S, width);
    if (!is_last(arrived)) return;
    Gathering<PACKED> all(C, width);
    double sum = all.sum(sums), square = all.sum(squares);
    if (!all.leads()) return;
    I c = all.c;
    Moments moments((A)x[c], sum, square, (double)N);
    mean[c] = (P)moments.average;
    inv_std[c] = moments.inverse(eps);
    if (update) moments.move(running_mean + c, running_var + c, momentum);
}

KERNEL batch_norm_last(const T* x, const P* gamma, const P* beta, const P* mean,
                       const P* inv_std, const T* term, T* y, I N, I C, I S, I width,
                       I relu) {
    ChannelsOf<PACKED> channel(N, C, S, width);
    NormedOf<PACKED> normed(channel.own(), gamma, beta, mean, inv_std);
    apply<false>(channel, normed.of, 0, x, term, y, relu);
}

KERNEL batch_norm(FORWARD, const double* sums, const double* squares, I N, I C, I S,
                  I width, RULES) {
    Channel channel(N, C, S, width);
    I c = channel.own();
    Moments moments((A)x[c * S], lane_total(sums, gridDim.y, C, c, width),
                    lane_total(squares, gridDim.y, C, c, width), (double)N * S);
    normalise<false>(channel, moments, 0, x, gamma, beta, running_mean, running_var,
                     term, y, mean, inv_std, eps, momentum, update, relu);
}

KERNEL batch_norm_whole(FORWARD, I N, I C, I S, RULES) {
    alignas(16) __shared__ T room[ROOM];
    Channel channel(N, C, S, 1);
    MomentSums<true, 1> found(channel, x, room);
    found.sums.settle();
    found.squares.settle();
    Moments moments(found.origin[0], lane_sum(found.sums.far[0], 1),
                    lane_sum(found.squares.far[0], 1), (double)N * S);
    normalise<true>(channel, moments, room, x, gamma, beta, running_mean, running_var,
                    term, y, mean, inv_std, eps, momentum, update, relu);
}

#define EVAL                                                                      \
    const T *x, const P *gamma, const P *beta, const P *mean, const P *var, T *y,     \
        I N, I C, I S, I width, double eps
template <int CH> __device__ void evaluate(EVAL) {
    ChannelsOf<CH> channel(N, C, S, width);
    I c = channel.own();
    A factor[CH], centre[CH], shift[CH];
    for (int j = 0; j < CH; ++j) {
        factor[j] = (A)((double)gamma[c + j] / sqrt((double)var[c + j] + eps));
        centre[j] = (A)mean[c + j], shift[j] = (A)beta[c + j];
    }
    EACH_PACK(channel, aligned(x) && aligned(y), (x), {
        Pack<T, W> v = found.of[0];
        for (int j = 0; j < W; ++j)
            v.at[j] = (T)(((A)v.at[j] - centre[OF(j)]) * factor[OF(j)] + shift[OF(j)]);
        store(y + at.i, v);
    })
}

KERNEL batch_norm_eval(EVAL) {
    evaluate<1>(x, gamma, beta, mean, var, y, N, C, S, width, eps);
}

KERNEL batch_norm_eval_last(EVAL) {
    evaluate<PACKED>(x, gamma, beta, mean, var, y, N, C, S, width, eps);
}
