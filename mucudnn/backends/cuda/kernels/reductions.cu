#include "prelude.cuh"
#include "channels.cuh"
#include "finish.cuh"
#include "last_block.cuh"

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
