"""Max pooling, with the position of each maximum in its window, and its gradient.

A thread computes one result, or with channels last as many as fill a memory access. In
the gradient results are elements of the image, gathered in order from the windows that
contain them.
"""

from mucudnn.backends.cuda.kernels.program import (
    KernelCall,
    Operation,
    Program,
    walking,
)
from mucudnn.backends.cuda.kernels.windows import WINDOWS, geometry

__all__ = ["OPERATIONS", "PROGRAM"]

PROGRAM = Program(
    WINDOWS
    + r"""
typedef unsigned char Tap;

// Padding is never chosen. NaN is above all numbers.
template <int V>
__device__ void pool(const T* x, T* y, Tap* index, I count, const Axis& D,
                     const Axis& H, const Axis& W) {
    for (Walk at(W.out / V, H.out, D.out); at.i < count / V; at.next()) {
        I ow = at.w * V, oh = at.h, od = at.d;
        const T* image = x + at.image * D.size * H.size * W.size;
        A best[V];
        int chosen[V];
        for (int j = 0; j < V; ++j) best[j] = -(A)INFINITY, chosen[j] = -1;
        for (I d = D.first(od); d < D.end(od); ++d)
            for (I h = H.first(oh); h < H.end(oh); ++h)
                for (I w = W.first(ow); w < W.end(ow); ++w) {
                    Pack<T, V> v = load<V>(image + (d * H.size + h) * W.size + w);
                    int tap = ((d - D.origin(od)) * H.kernel + h - H.origin(oh)) *
                                  W.kernel + w - W.origin(ow);
                    for (int j = 0; j < V; ++j) {
                        A value = (A)v.at[j];
                        bool above = best[j] == best[j] && !(value <= best[j]);
                        above = above || chosen[j] < 0;
                        best[j] = above ? value : best[j];
                        chosen[j] = above ? tap : chosen[j];
                    }
                }
        Pack<T, V> made;
        Pack<Tap, V> taps;
        for (int j = 0; j < V; ++j)
            made.at[j] = (T)best[j], taps.at[j] = (Tap)chosen[j];
        store(y + at.i * V, made);
        store(index + at.i * V, taps);
    }
}

KERNEL max_pool(const T* x, T* y, Tap* index, I count, AXES) {
    MAKE_AXES
    if (rows_pack(W) && aligned(x) && aligned(y) && aligned(index))
        pool<PACKED>(x, y, index, count, D, H, W);
    else
        pool<1>(x, y, index, count, D, H, W);
}

template <int V>
__device__ void gradient(const T* dy, const Tap* index, T* dx, I count, const Axis& D,
                         const Axis& H, const Axis& W) {
    gather<V>(dx, count, D, H, W,
              [&](A* sums, const Walk& at, I o, I od, I oh, I ow) {
        int tap = ((at.d - D.origin(od)) * H.kernel + at.h - H.origin(oh)) * W.kernel +
                  at.w * V - W.origin(ow);
        Pack<Tap, V> taps = load<V>(index + o);
        Pack<T, V> d = load<V>(dy + o);
        for (int j = 0; j < V; ++j) sums[j] += taps.at[j] == tap ? (A)d.at[j] : (A)0;
    });
}

KERNEL max_pool_grad(const T* dy, const Tap* index, T* dx, I count, AXES) {
    MAKE_AXES
    if (rows_pack(W) && aligned(dy) && aligned(index) && aligned(dx))
        gradient<PACKED>(dy, index, dx, count, D, H, W);
    else
        gradient<1>(dy, index, dx, count, D, H, W);
}
"""
)


def max_pool(call: KernelCall) -> None:
    """Compute (y, index): the maximum, and its element number in the window.

    The first of equal maxima counts; if an element is NaN, so is the maximum.
    """
    (x,), (y, index) = call.inputs, call.outputs
    axes = geometry(x.shape, y.shape, call.attrs)
    call.launch(PROGRAM, "max_pool", walking(y.size), x, y, index, y.size, *axes)


def max_pool_grad(call: KernelCall) -> None:
    """Compute dx: each dy at the position of its maximum."""
    (dy, index), (dx,) = call.inputs, call.outputs
    axes = geometry(dx.shape, dy.shape, call.attrs)
    arguments = dy, index, dx, dx.size, *axes
    call.launch(PROGRAM, "max_pool_grad", walking(dx.size), *arguments)


OPERATIONS: dict[str, Operation] = {
    "max_pool": Operation(max_pool),
    "max_pool_grad": Operation(max_pool_grad),
}
