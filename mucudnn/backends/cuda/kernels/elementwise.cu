#include "prelude.cuh"

template <int W, class F>
__device__ void span(const T* a, const T* b, T* y, I first, I stop, const F& formula) {
    I thread = (I)blockIdx.x * THREADS + threadIdx.x, step = (I)gridDim.x * THREADS * W;
    for (I i = first + thread * W; i < stop; i += step) {
        Pack<T, W> x = load<W>(a + i), d = load<W>(b + i);
        for (int j = 0; j < W; ++j)
            x.at[j] = (T)formula((A)x.at[j], (A)d.at[j]);
        store(y + i, x);
    }
}
template <class F>
__device__ void map(const T* a, const T* b, T* y, I count, const F& formula) {
    bool packed = aligned(a) && aligned(b) && aligned(y);
    I whole = packed ? count / PACKED * PACKED : 0;
    span<PACKED>(a, b, y, 0, whole, formula);
    span<1>(a, b, y, whole, count, formula);
}
// A single tensor is passed as both inputs; the compiler merges the two reads.
#define ONE(formula) map(a, a, y, count, [=](A x, A) -> A { return formula; });
#define TWO(formula) map(a, b, y, count, [=](A x, A d) -> A { return formula; });

// The probability that a standard normal variable is below x, and its density.
__device__ A below(A x) { return (A)0.5 * (1 + erf(x * (A)0.70710678118654752)); }
__device__ A density(A x) {
    return (A)0.39894228040143268 * exp((A)-0.5 * x * x);
}

KERNEL add(const T* a, const T* b, T* y, I count) { TWO(x + d) }
KERNEL multiply(const T* a, const T* b, T* y, I count) { TWO(x * d) }
KERNEL scale(const T* a, T* y, I count, double factor) { ONE(x * (A)factor) }

KERNEL relu(const T* a, T* y, I count) { ONE(x > 0 || x != x ? x : (A)0) }
KERNEL add_relu(const T* a, const T* b, T* y, I count) {
    TWO(x + d > 0 || x + d != x + d ? x + d : (A)0)
}
KERNEL relu_grad(const T* a, const T* b, T* y, I count) { TWO(x != 0 ? d : (A)0) }

KERNEL leaky_relu(const T* a, T* y, I count, double slope) {
    ONE(x > 0 ? x : (A)slope * x)
}
KERNEL leaky_relu_grad(const T* a, const T* b, T* y, I count, double slope) {
    TWO(x > 0 ? d : (A)slope * d)
}

KERNEL gelu(const T* a, T* y, I count) { ONE(x * below(x)) }
KERNEL gelu_grad(const T* a, const T* b, T* y, I count) {
    TWO(d * (below(x) + x * density(x)))
}

KERNEL sigmoid(const T* a, T* y, I count) { ONE(1 / (1 + exp(-x))) }
KERNEL sigmoid_grad(const T* a, const T* b, T* y, I count) { TWO(d * x * (1 - x)) }

KERNEL tanh_(const T* a, T* y, I count) { ONE(tanh(x)) }
KERNEL tanh_grad(const T* a, const T* b, T* y, I count) { TWO(d * (1 - x * x)) }
