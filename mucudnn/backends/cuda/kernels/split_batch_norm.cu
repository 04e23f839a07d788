#include "prelude.cuh"
#include "channels.cuh"
#include "normed.cuh"

KERNEL finish_moments(const T* x, const double* sums, const double* squares,
                      double* stats, I parts, I N, I C, I S) {
    EACH(c, C) {
        double count = (double)N * S, sum = total(sums, parts, C, c);
        double rest = total(squares, parts, C, c) - sum * sum / count;
        stats[c] = count;
        stats[C + c] = (double)(A)x[c * S] + sum / count;
        stats[2 * C + c] = rest > 0 ? rest : 0;
    }
}

KERNEL join_moments(const double* stats, double* all, const T* type, I C, I first) {
    EACH(c, C) {
        if (first) {
            for (I row = 0; row < 3; ++row) all[row * C + c] = stats[row * C + c];
            continue;
        }
        double one = all[c], other = stats[c], count = one + other;
        double apart = stats[C + c] - all[C + c];
        all[c] = count;
        all[C + c] += apart * (other / count);
        all[2 * C + c] += stats[2 * C + c] + apart * apart * (one * other / count);
    }
}

KERNEL batch_norm_merge(const double* all, T* running_mean, T* running_var, T* mean,
                        T* inv_std, I C, double eps, double momentum, I update) {
    EACH(c, C) {
        double count = all[c], average = all[C + c], square = all[2 * C + c];
        mean[c] = (T)(A)average;
        inv_std[c] = (T)(A)(1 / sqrt(square / count + eps));
        if (!update) continue;
        double unbiased = square / (count > 1 ? count - 1 : 1), rest = 1 - momentum;
        running_mean[c] =
            (T)(A)(rest * (double)(A)running_mean[c] + momentum * average);
        running_var[c] = (T)(A)(rest * (double)(A)running_var[c] + momentum * unbiased);
    }
}

KERNEL batch_norm_apply(const T* x, const P* gamma, const P* beta, const P* mean,
                        const P* inv_std, T* y, I N, I C, I S, I width) {
    Channel channel(N, C, S, width);
    I c = channel.c;
    if (c >= C) return;
    Normed normed(mean[c], inv_std[c], gamma[c], beta[c]);
    constexpr int CH = 1;
    EACH_PACK(channel, aligned(x) && aligned(y), (x), {
        Pack<T, W> v = found.of[0];
        for (int j = 0; j < W; ++j) v.at[j] = (T)normed(v.at[j]);
        store(y + at.i, v);
    })
}

KERNEL batch_norm_grad_sums(const T* inv_std, T* dgamma, T* dbeta, const double* sums,
                            const double* dots, I parts, I C) {
    EACH(c, C) {
        dgamma[c] = (T)(A)(total(dots, parts, C, c) * (double)inv_std[c]);
        dbeta[c] = (T)(A)total(sums, parts, C, c);
    }
}

#define GRADIENT                                                                  \
    const T *x, const T *dy, const P *gamma, const P *mean, const P *inv_std,         \
        const P *dgamma, const P *dbeta, T *dx, I N, I C, I S, I width, double count
template <int CH> __device__ void gradient_of(GRADIENT) {
    ChannelsOf<CH> channel(N, C, S, width);
    I c = channel.own();
    InputGrad grad[CH];
    for (int j = 0; j < CH; ++j) {
        double dot = (double)dgamma[c + j] / (double)inv_std[c + j];
        grad[j] = InputGrad(mean[c + j], inv_std[c + j], gamma[c + j],
                            (double)dbeta[c + j], dot, count);
    }
    EACH_PACK(channel, aligned(x) && aligned(dy) && aligned(dx), (x, dy), {
        Pack<T, W> v = found.of[0], d = found.of[1];
        for (int j = 0; j < W; ++j) v.at[j] = (T)grad[OF(j)](v.at[j], (A)d.at[j]);
        store(dx + at.i, v);
    })
}

KERNEL batch_norm_grad_apply(GRADIENT) {
    gradient_of<1>(x, dy, gamma, mean, inv_std, dgamma, dbeta, dx, N, C, S, width,
                   count);
}

KERNEL batch_norm_grad_apply_last(GRADIENT) {
    gradient_of<PACKED>(x, dy, gamma, mean, inv_std, dgamma, dbeta, dx, N, C, S, width,
                        count);
}
