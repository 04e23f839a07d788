#include "prelude.cuh"
#include "windows.cuh"

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
    for (Walk at(W.size / V, H.size, D.size); at.i < count / V; at.next()) {
        I w = at.w * V, image = at.image * D.out * H.out * W.out;
        Windows ds(D, at.d), hs(H, at.h);
        Windows ws = V > 1 ? Windows{w, w + 1} : Windows(W, w);
        A sums[V] = {};
        for (I od = ds.first; od < ds.end; ++od)
            for (I oh = hs.first; oh < hs.end; ++oh)
                for (I ow = ws.first; ow < ws.end; ow += V) {
                    int tap = ((at.d - D.origin(od)) * H.kernel + at.h - H.origin(oh)) *
                                  W.kernel + w - W.origin(ow);
                    I o = image + (od * H.out + oh) * W.out + ow;
                    Pack<Tap, V> taps = load<V>(index + o);
                    Pack<T, V> d = load<V>(dy + o);
                    for (int j = 0; j < V; ++j)
                        sums[j] += taps.at[j] == tap ? (A)d.at[j] : (A)0;
                }
        Pack<T, V> made;
        for (int j = 0; j < V; ++j) made.at[j] = (T)sums[j];
        store(dx + at.i * V, made);
    }
}

KERNEL max_pool_grad(const T* dy, const Tap* index, T* dx, I count, AXES) {
    MAKE_AXES
    if (rows_pack(W) && aligned(dy) && aligned(index) && aligned(dx))
        gradient<PACKED>(dy, index, dx, count, D, H, W);
    else
        gradient<1>(dy, index, dx, count, D, H, W);
}
