#include "prelude.cuh"
#include "windows.cuh"

// The sum over `width` neighbouring threads, a power of two.
__device__ double neighbour_sum(double value, I width) {
    __shared__ double sums[THREADS / 32];
    for (int other = width < 32 ? width / 2 : 16; other > 0; other /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, other);
    if (width <= 32) return value;
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    I first = threadIdx.x / width * width / 32;
    value = 0;
    for (I warp = 0; warp < width / 32; ++warp) value += sums[first + warp];
    return value;
}

KERNEL image_means(const T* x, T* y, I planes, I pixels, I width) {
    I together = THREADS / width;
    for (I base = blockIdx.x * together; base < planes;
         base += (I)gridDim.x * together) {
        I plane = base + threadIdx.x / width;
        double sum = 0;
        if (plane < planes)
            for (I s = threadIdx.x % width; s < pixels; s += width)
                sum += (double)x[plane * pixels + s];
        sum = neighbour_sum(sum, width);
        if (plane < planes && threadIdx.x % width == 0) y[plane] = (T)(sum / pixels);
    }
}

template <int V>
__device__ void pool(const T* x, T* y, I count, I padded, const Axis& D, const Axis& H,
                     const Axis& W) {
    for (Walk at(W.out / V, H.out, D.out); at.i < count / V; at.next()) {
        I ow = at.w * V, oh = at.h, od = at.d;
        const T* image = x + at.image * D.size * H.size * W.size;
        A sums[V] = {};
        for (I d = D.first(od); d < D.end(od); ++d)
            for (I h = H.first(oh); h < H.end(oh); ++h)
#pragma unroll 4
                for (I w = W.first(ow); w < W.end(ow); ++w) {
                    Pack<T, V> v = load<V>(image + (d * H.size + h) * W.size + w);
                    for (int j = 0; j < V; ++j) sums[j] += (A)v.at[j];
                }
        I elements = D.counted(od, padded) * H.counted(oh, padded) *
                     W.counted(ow, padded);
        Pack<T, V> made;
        for (int j = 0; j < V; ++j) made.at[j] = (T)(sums[j] / elements);
        store(y + at.i * V, made);
    }
}

KERNEL avg_pool(const T* x, T* y, I count, I padded, AXES) {
    MAKE_AXES
    if (rows_pack(W) && aligned(x) && aligned(y))
        pool<PACKED>(x, y, count, padded, D, H, W);
    else
        pool<1>(x, y, count, padded, D, H, W);
}

template <int V>
__device__ void gradient(const T* dy, T* dx, I count, I padded, const Axis& D,
                         const Axis& H, const Axis& W) {
    for (Walk at(W.size / V, H.size, D.size); at.i < count / V; at.next()) {
        I w = at.w * V, image = at.image * D.out * H.out * W.out;
        Windows ds(D, at.d), hs(H, at.h);
        Windows ws = V > 1 ? Windows{w, w + 1} : Windows(W, w);
        A sums[V] = {};
        for (I od = ds.first; od < ds.end; ++od)
            for (I oh = hs.first; oh < hs.end; ++oh)
#pragma unroll 1
                for (I ow = ws.first; ow < ws.end; ow += V) {
                    Pack<T, V> d =
                        load<V>(dy + image + (od * H.out + oh) * W.out + ow);
                    A share = (A)1 / (D.counted(od, padded) * H.counted(oh, padded) *
                                      W.counted(ow, padded));
                    for (int j = 0; j < V; ++j) sums[j] += (A)d.at[j] * share;
                }
        Pack<T, V> made;
        for (int j = 0; j < V; ++j) made.at[j] = (T)sums[j];
        store(dx + at.i * V, made);
    }
}

KERNEL avg_pool_grad(const T* dy, T* dx, I count, I padded, AXES) {
    MAKE_AXES
    if (rows_pack(W) && aligned(dy) && aligned(dx))
        gradient<PACKED>(dy, dx, count, padded, D, H, W);
    else
        gradient<1>(dy, dx, count, padded, D, H, W);
}
