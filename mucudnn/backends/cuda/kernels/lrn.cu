#include "prelude.cuh"
#include "walk.cuh"

#define SHARED_ROWS 10  // of the ring; a thread has 16 bytes of each in shared memory
#define V_PACKED ((int)(16 / sizeof(A)))  // an access, but of what is computed

__device__ A power(A base, A beta) {
    if (beta == (A)0.75) return sqrt(base) * sqrt(sqrt(base));
    if (beta == (A)0.5) return sqrt(base);
    return beta == 1 ? base : pow(base, beta);
}

struct Rules {
    I C, S, size;
    A scale, beta, k;
    // d of channel c; x points at channel 0 of V neighbouring pixels.
    template <int V> __device__ Pack<A, V> base(const T* x, I c) const {
        I first = c - size / 2 > 0 ? c - size / 2 : 0;
        I last = c + (size - 1) / 2 < C - 1 ? c + (size - 1) / 2 : C - 1;
        Pack<A, V> sum = {};
        for (I j = first; j <= last; ++j) {
            Pack<T, V> v = load<V>(x + j * S);
            for (int e = 0; e < V; ++e) sum.at[e] += (A)v.at[e] * (A)v.at[e];
        }
        for (int e = 0; e < V; ++e) sum.at[e] = k + sum.at[e] * scale;
        return sum;
    }
};
#define RULES I C, I S, I size, double alpha, double beta, double k
#define MAKE_RULES                                                                \
    const Rules rules = {C, S, size, (A)(alpha / size), (A)beta, (A)k};

template <int V>
__device__ void normalise(const T* x, T* y, I pixels, I run, const Rules& rules) {
    I first = blockIdx.y * run, end = first + run < rules.C ? first + run : rules.C;
    EACH(p, pixels / V) {
        I pixel = p * V;
        I start = pixel / rules.S * rules.C * rules.S + pixel % rules.S;
        for (I c = first; c < end; ++c) {
            Pack<A, V> base = rules.base<V>(x + start, c);
            Pack<T, V> v = load<V>(x + start + c * rules.S);
            for (int e = 0; e < V; ++e)
                v.at[e] = (T)((A)v.at[e] / power(base.at[e], rules.beta));
            store(y + start + c * rules.S, v);
        }
    }
}

KERNEL lrn(const T* x, T* y, I pixels, I run, RULES) {
    MAKE_RULES
    if (S % V_PACKED == 0 && aligned(x) && aligned(y))
        normalise<V_PACKED>(x, y, pixels, run, rules);
    else
        normalise<1>(x, y, pixels, run, rules);
}

KERNEL lrn_last(const T* x, T* y, I count, RULES) {
    MAKE_RULES
    EACH_AT(at, count, S, C, 1) {
        Pack<A, 1> base = rules.base<1>(x + (at.i - at.h * S), at.h);
        y[at.i] = (T)((A)x[at.i] / power(base.at[0], rules.beta));
    }
}

template <int V>
__device__ void gradient(const T* x, const T* y, const T* dy, T* dx, Pack<A, V>* ring,
                         I apart, I pixels, A factor, const Rules& rules) {
    I C = rules.C, S = rules.S, size = rules.size, after = size / 2;
    EACH(p, pixels / V) {
        I pixel = p * V, start = pixel / S * C * S + pixel % S, slot = 0;
        for (I row = 0; row < size; ++row) ring[row * apart] = Pack<A, V>{};
        for (I next = 0; next < C + after; ++next) {
            Pack<A, V> ratio = {};
            if (next < C) {
                Pack<A, V> base = rules.base<V>(x + start, next);
                Pack<T, V> d = load<V>(dy + start + next * S);
                Pack<T, V> v = load<V>(y + start + next * S);
                for (int e = 0; e < V; ++e)
                    ratio.at[e] = (A)d.at[e] * (A)v.at[e] / base.at[e];
            }
            ring[slot * apart] = ratio;
            if (++slot == size) slot = 0;
            I c = next - after;
            if (c < 0) continue;
            Pack<A, V> sum = {}, own = rules.base<V>(x + start, c);
            for (I row = 0; row < size; ++row)
                for (int e = 0; e < V; ++e) sum.at[e] += ring[row * apart].at[e];
            I i = start + c * S;
            Pack<T, V> v = load<V>(x + i), d = load<V>(dy + i);
            for (int e = 0; e < V; ++e)
                d.at[e] = (T)((A)d.at[e] / power(own.at[e], rules.beta) +
                              sum.at[e] * (A)v.at[e] * factor);
            store(dx + i, d);
        }
    }
}

template <int V>
__device__ void gradient(const T* x, const T* y, const T* dy, T* dx, A* shared,
                         A* workspace, I pixels, A factor, const Rules& rules) {
    if (rules.size <= SHARED_ROWS) {
        Pack<A, V>* ring = (Pack<A, V>*)shared + threadIdx.x;
        gradient<V>(x, y, dy, dx, ring, THREADS, pixels, factor, rules);
    } else {
        I thread = (I)blockIdx.x * THREADS + threadIdx.x;
        Pack<A, V>* ring = (Pack<A, V>*)workspace + thread;
        gradient<V>(x, y, dy, dx, ring, (I)gridDim.x * THREADS, pixels, factor, rules);
    }
}

KERNEL lrn_grad(const T* x, const T* y, const T* dy, T* dx, A* workspace, I pixels,
                RULES) {
    alignas(16) __shared__ A shared[SHARED_ROWS * THREADS * V_PACKED];
    MAKE_RULES
    A factor = (A)(-2 * alpha * beta / size);
    if (S % V_PACKED == 0 && aligned(x) && aligned(y) && aligned(dy) && aligned(dx))
        gradient<V_PACKED>(x, y, dy, dx, shared, workspace, pixels, factor, rules);
    else
        gradient<1>(x, y, dy, dx, shared, workspace, pixels, factor, rules);
}
