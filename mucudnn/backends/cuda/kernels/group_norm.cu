#include "prelude.cuh"
#include "channels.cuh"
#include "finish.cuh"
#include "rows.cuh"

#define FORWARD                                                                   \
    const T *x, const P *gamma, const P *beta, T *y, P *mean, P *inv_std
template <class R> __device__ void forward(const R& row, FORWARD, double eps) {
    I length = row.length;
    double sum = 0, squares = 0;
    EACH_OF_ROW(row, aligned(x), {
        Pack<T, W> v = load<W>(x + at.i);
        A part = 0;
        for (int j = 0; j < W; ++j) part += (A)v.at[j];
        sum += (double)part;
    })
    double average = lane_sum(sum, 1) / length;
    A centre = (A)(P)average;
    EACH_OF_ROW(row, aligned(x), {
        Pack<T, W> v = load<W>(x + at.i);
        A part = 0;
        for (int j = 0; j < W; ++j) {
            A deviation = (A)v.at[j] - centre;
            part += deviation * deviation;
        }
        squares += (double)part;
    })
    A inverse = (A)(1 / sqrt(lane_sum(squares, 1) / length + eps));
    normalise(row, x, gamma, beta, centre, inverse, y);
    if (threadIdx.x != 0) return;
    mean[blockIdx.x] = (P)average;
    inv_std[blockIdx.x] = (P)inverse;
}

KERNEL group_norm(FORWARD, I groups, I length, I inner, double eps) {
    Row row(blockIdx.x, groups, length, inner, 0, 1);
    forward(row, x, gamma, beta, y, mean, inv_std, eps);
}

KERNEL group_norm_last(FORWARD, I groups, I pixels, I C, double eps) {
    LastRow row(blockIdx.x, groups, pixels, C, aligned(x) && aligned(y));
    forward(row, x, gamma, beta, y, mean, inv_std, eps);
}

#define BACKWARD                                                                  \
    const T *x, const T *dy, const P *gamma, const P *mean, const P *inv_std, T *dx
template <class R> __device__ void backward(const R& row, BACKWARD) {
    A centre = (A)mean[blockIdx.x], inverse = (A)inv_std[blockIdx.x];
    RowSums sums(row, x, dy, gamma, centre);
    input_grad(row, x, dy, gamma, centre, inverse, sums.sum, sums.dots, row.length, dx);
}

KERNEL group_norm_grad(BACKWARD, I groups, I length, I inner) {
    Row row(blockIdx.x, groups, length, inner, 0, 1);
    backward(row, x, dy, gamma, mean, inv_std, dx);
}

KERNEL group_norm_grad_last(BACKWARD, I groups, I pixels, I C) {
    LastRow row(blockIdx.x, groups, pixels, C,
                aligned(x) && aligned(dy) && aligned(dx));
    backward(row, x, dy, gamma, mean, inv_std, dx);
}

#define GAMMA_GRAD                                                                \
    const T *x, const T *dy, const P *mean, const P *inv_std, double *gammas,         \
        double *betas, I N, I C, I S, I width, I groups, I pixels
template <int CH> __device__ void gamma_of(GAMMA_GRAD) {
    ChannelsOf<CH> channel(N, C, S, width);
    I each = C / groups, own = channel.own() / each, rest = channel.own() - own * each;
    I group[CH];
    for (int j = 0; j < CH; ++j) {
        group[j] = own;
        if (++rest == each) rest = 0, ++own;
    }
    Tally<CH> dots, sums;
    // Of the elements summed over, `pixels` contiguous ones belong to one sample.
    I sample = (CH > 1 ? channel.start : channel.start / S) / pixels;
    I behind = (sample + 1) * pixels;
    EACH_PACK(channel, aligned(x) && aligned(dy), (x, dy), {
        Pack<T, W> v = found.of[0], d = found.of[1];
        while (pixels > 1 && at.n >= behind) ++sample, behind += pixels;
        for (int j = 0; j < W; ++j) {
            I row = (pixels == 1 ? at.n : sample) * groups + group[OF(j)];
            A normed = ((A)v.at[j] - (A)mean[row]) * (A)inv_std[row];
            dots.add(j, normed * (A)d.at[j]);
            sums.add(j, (A)d.at[j]);
        }
        dots.added();
        sums.added();
    })
    leave_sums(channel, dots, gammas, width);
    leave_sums(channel, sums, betas, width);
}

KERNEL gamma_grad(GAMMA_GRAD) {
    gamma_of<1>(x, dy, mean, inv_std, gammas, betas, N, C, S, width, groups, pixels);
}

KERNEL gamma_grad_last(GAMMA_GRAD) {
    gamma_of<PACKED>(x, dy, mean, inv_std, gammas, betas, N, C, S, width, groups,
                     pixels);
}
