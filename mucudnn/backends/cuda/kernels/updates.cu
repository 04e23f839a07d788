#include "prelude.cuh"
#include "table.cuh"

// Scalars of every update; `scale` and `counts` may be missing.
struct Common {
    A rate, factor;
    bool skipped;
    __device__ Common(const T* lr, const T* scale, const long long* counts,
                      double factor)
        : rate((A)lr[0]), factor((A)(scale ? factor / (double)scale[0] : factor)),
          skipped(counts && counts[0]) {}
};

struct Sgd {
    static const int STATES = 0;
    A rate;
    __device__ A operator()(A w, A g, A decay, A*) const {
        return w - rate * (g + w * decay);
    }
};

struct Momentum {
    static const int STATES = 1;
    A rate, mu;
    bool nesterov;
    __device__ A operator()(A w, A g, A decay, A* m) const {
        g += w * decay;
        m[0] = mu * m[0] + g;
        return w - rate * (nesterov ? g + mu * m[0] : m[0]);
    }
};

struct Adam {
    static const int STATES = 2;
    A lr, rate, root, beta1, other1, beta2, other2, eps;
    bool decoupled;
    __device__ A operator()(A w, A g, A decay, A* s) const {
        if (decoupled) w *= 1 - lr * decay;
        else g += w * decay;
        s[0] = beta1 * s[0] + other1 * g;
        s[1] = beta2 * s[1] + other2 * (g * g);
        return w - rate * (s[0] / (sqrt(s[1]) * root + eps));
    }
};

struct AdaGrad {
    static const int STATES = 1;
    A rate, eps;
    __device__ A operator()(A w, A g, A decay, A* s) const {
        g += w * decay;
        s[0] += g * g;
        return w - rate * (g / (sqrt(s[0]) + eps));
    }
};

struct RmsProp {
    static const int STATES = 1;
    A rate, alpha, other, eps;
    __device__ A operator()(A w, A g, A decay, A* s) const {
        g += w * decay;
        s[0] = alpha * s[0] + other * (g * g);
        return w - rate * (g / (sqrt(s[0]) + eps));
    }
};

// Position of a weight's element in its gradient and copy: the same.
struct Same {
    __device__ I at(I i) const { return i; }
    __device__ void next() {}
};
// Or transposed from (K, C, taps) to (K, taps, C). Divides for a thread's first only.
struct Turned {
    I channels, taps, c, s, step_c, step_s;
    long long row, step_row, size;
    __device__ Turned(long long first, I step, I channels, I taps)
        : channels(channels), taps(taps), c((I)(first / taps % channels)),
          s((I)(first % taps)), step_c(step / taps % channels), step_s(step % taps),
          size((long long)channels * taps) {
        row = first / size * size;
        step_row = step / size * size;
    }
    __device__ long long at(I) const { return row + (long long)s * channels + c; }
    __device__ void next() {
        s += step_s;
        c += step_c;
        row += step_row;
        if (s >= taps) s -= taps, ++c;
        if (c >= channels) c -= channels, row += size;
    }
};
// A weight, its gradient, its state, and its copy if there is one.
struct Tensors {
    T* w;
    const P* dw;
    T* state[2];
    P* copy;
    __device__ bool packed() const {
        return aligned(w) && aligned(dw) && aligned(state[0]) && aligned(state[1]) &&
               aligned(copy);
    }
};
template <int W, class Place, class Rule>
__device__ void span(const Tensors& t, I first, I stop, I step, Place place, A factor,
                     A decay, const Rule& rule) {
    const int STATES = Rule::STATES;
    for (I i = first; i < stop; i += step, place.next()) {
        Pack<T, W> w = load<W>(t.w + i), kept[STATES + 1];
        Pack<P, W> dw = load<W>(t.dw + place.at(i));
        for (int k = 0; k < STATES; ++k) kept[k] = load<W>(t.state[k] + i);
        for (int j = 0; j < W; ++j) {
            A states[STATES + 1];
            for (int k = 0; k < STATES; ++k) states[k] = (A)kept[k].at[j];
            w.at[j] = (T)rule((A)w.at[j], (A)dw.at[j] * factor, decay, states);
            for (int k = 0; k < STATES; ++k) kept[k].at[j] = (T)states[k];
        }
        store(t.w + i, w);
        for (int k = 0; k < STATES; ++k) store(t.state[k] + i, kept[k]);
        if (!t.copy) continue;
        for (int j = 0; j < W; ++j) dw.at[j] = (P)(A)w.at[j];
        store(t.copy + place.at(i), dw);
    }
}
template <class Rule>
__device__ void update(const Tensors& t, I count, I thread, I threads, long long start,
                       I channels, I taps, A factor, A decay, const Rule& rule) {
    if (taps > 0) {
        Turned place(start + thread, threads, channels, taps);
        span<1>(t, thread, count, threads, place, factor, decay, rule);
        return;
    }
    I whole = t.packed() ? count / PACKED * PACKED : 0, step = threads * PACKED;
    span<PACKED>(t, thread * PACKED, whole, step, Same(), factor, decay, rule);
    span<1>(t, whole + thread, count, threads, Same(), factor, decay, rule);
}

#define SCALARS                                                                   \
    const T *lr, const long long *step, const T *scale, const long long *counts,  \
        I count, double decay, double factor

// The kernels of one tensor: their parameters, and their body behind `common`.
#define TENSOR                                                                    \
    T *w, const P *dw, T *first, T *second, P *copy, I channels, I taps, SCALARS
#define UPDATE_TENSOR(...)                                                        \
    if (common.skipped) return;                                                   \
    I thread = (I)blockIdx.x * THREADS + threadIdx.x;                             \
    update(Tensors{w, dw, {first, second}, copy}, count, thread,                  \
           (I)gridDim.x * THREADS, 0, channels, taps, common.factor, (A)decay,    \
           __VA_ARGS__);

// The kernels of a table of tensors, `count` rows.
#define TABLE const long long *table, SCALARS
#define UPDATE_TABLE(...)                                                         \
    if (common.skipped) return;                                                   \
    Part part(table, count);                                                      \
    bool turned = part.taps() > 0;                                                \
    Tensors t{part.array<T>(0), part.array<P>(1, turned),                         \
              {part.array<T>(2), part.array<T>(3)}, part.array<P>(4, turned)};    \
    update(t, part.count, (I)threadIdx.x, (I)THREADS, part.start,                 \
           part.channels(), part.taps(), common.factor,                           \
           part.flag() ? (A)decay : (A)0, __VA_ARGS__);

KERNEL sgd(TENSOR) {
    Common common(lr, scale, counts, factor);
    UPDATE_TENSOR(Sgd{common.rate})
}
KERNEL sgd_all(TABLE) {
    Common common(lr, scale, counts, factor);
    UPDATE_TABLE(Sgd{common.rate})
}

#define MOMENTUM Momentum{common.rate, (A)mu, nesterov != 0}
KERNEL momentum(TENSOR, double mu, I nesterov) {
    Common common(lr, scale, counts, factor);
    UPDATE_TENSOR(MOMENTUM)
}
KERNEL momentum_all(TABLE, double mu, I nesterov) {
    Common common(lr, scale, counts, factor);
    UPDATE_TABLE(MOMENTUM)
}

// Steps in which gradients overflowed, counts[2], were not taken.
#define CORRECT_BIAS                                                              \
    __shared__ double shared[2];                                                  \
    if (threadIdx.x == 0) {                                                       \
        double taken = (double)(*step + 1 - (counts ? counts[2] : 0));            \
        shared[0] = (double)(A)lr[0] / (1 - pow(beta1, taken));                   \
        shared[1] = 1 / sqrt(1 - pow(beta2, taken));                              \
    }                                                                             \
    __syncthreads();
#define ADAM                                                                      \
    Adam {                                                                        \
        common.rate, (A)shared[0], (A)shared[1], (A)beta1, (A)(1 - beta1),        \
            (A)beta2, (A)(1 - beta2), (A)eps, decoupled != 0                      \
    }
KERNEL adam(TENSOR, double beta1, double beta2, double eps, I decoupled) {
    Common common(lr, scale, counts, factor);
    CORRECT_BIAS
    UPDATE_TENSOR(ADAM)
}
KERNEL adam_all(TABLE, double beta1, double beta2, double eps, I decoupled) {
    Common common(lr, scale, counts, factor);
    CORRECT_BIAS
    UPDATE_TABLE(ADAM)
}

#define ADAGRAD AdaGrad{common.rate, (A)eps}
KERNEL adagrad(TENSOR, double eps) {
    Common common(lr, scale, counts, factor);
    UPDATE_TENSOR(ADAGRAD)
}
KERNEL adagrad_all(TABLE, double eps) {
    Common common(lr, scale, counts, factor);
    UPDATE_TABLE(ADAGRAD)
}

#define RMSPROP RmsProp{common.rate, (A)alpha, (A)(1 - alpha), (A)eps}
KERNEL rmsprop(TENSOR, double alpha, double eps) {
    Common common(lr, scale, counts, factor);
    UPDATE_TENSOR(RMSPROP)
}
KERNEL rmsprop_all(TABLE, double alpha, double eps) {
    Common common(lr, scale, counts, factor);
    UPDATE_TABLE(RMSPROP)
}
