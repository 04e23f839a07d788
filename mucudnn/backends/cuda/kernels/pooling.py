"""Average and maximum pooling, with their gradients.

The divisor of a window's sum is counted along each axis separately: elements inside the
image, or inside it and its padding, but never positions that exist only because the
number of windows was rounded up.
"""

import math
from collections.abc import Sequence

from mucudnn.backends.cuda.kernels.launch import (
    Attrs,
    KernelCall,
    Operation,
    flat,
    walking,
)
from mucudnn.backends.cuda.kernels.source import THREADS, Program

_ABSENT = (1, 1, 1, 1, 0)  # size, out, kernel, stride, padding of a missing axis


WALK = r"""
// Iterates over a thread's elements and their indices along axes of these sizes.
struct Walk {
    I i, w, h, d, image, W, H, D, step, step_w, step_h, step_d, step_image;
    __device__ Walk(I W, I H, I D)
        : i((I)blockIdx.x * THREADS + threadIdx.x), w(i % W), h(i / W % H),
          d(i / W / H % D), image(i / W / H / D), W(W), H(H), D(D),
          step((I)gridDim.x * THREADS), step_w(step % W), step_h(step / W % H),
          step_d(step / W / H % D), step_image(step / W / H / D) {}
    __device__ void next() {
        i += step;
        w += step_w;
        h += step_h;
        d += step_d;
        image += step_image;
        if (w >= W) w -= W, ++h;
        if (h >= H) h -= H, ++d;
        if (d >= D) d -= D, ++image;
    }
};
#define EACH_AT(at, count, W, H, D) for (Walk at(W, H, D); at.i < (count); at.next())
"""


WINDOWS = (
    WALK
    + r"""
// One axis of an image and its windows.
struct Axis {
    I size, out, kernel, stride, padding;
    // Most strides are 1 or 2, for which no division is needed.
    __device__ I by_stride(I x) const {
        return stride == 1 ? x : stride == 2 ? x / 2 : x / stride;
    }
    // Windows that hold an element: from `earliest` to before `past`.
    __device__ I earliest(I x) const {
        I beyond = x + padding - kernel + 1;
        return beyond > 0 ? by_stride(beyond + stride - 1) : 0;
    }
    __device__ I past(I x) const {
        I last = by_stride(x + padding);
        return last < out ? last + 1 : out;
    }
    // The window's elements in the image: from `first` to before `end`.
    __device__ I origin(I o) const { return o * stride - padding; }
    __device__ I first(I o) const { return origin(o) > 0 ? origin(o) : 0; }
    __device__ I end(I o) const {
        return origin(o) + kernel < size ? origin(o) + kernel : size;
    }
    __device__ I counted(I o, bool padded) const {
        if (!padded) return end(o) - first(o);
        I stop = origin(o) + kernel;
        return (stop < size + padding ? stop : size + padding) - origin(o);
    }
};
// Range of windows that contain a position, computed once before a loop.
struct Windows {
    I first, end;
    __device__ Windows(I first, I end) : first(first), end(end) {}
    __device__ Windows(const Axis& axis, I x)
        : first(axis.earliest(x)), end(axis.past(x)) {}
};
// Whether windows have width 1 along rows of whole accesses, as with channels last:
// then neighbours are in the same windows, and a thread takes PACKED of them.
__device__ bool rows_pack(const Axis& W) {
    return W.kernel == 1 && W.stride == 1 && W.padding == 0 && W.size == W.out &&
           W.size % PACKED == 0;
}
#define AXES                                                                      \
    I d_size, I d_out, I d_kernel, I d_stride, I d_padding, I h_size, I h_out,    \
        I h_kernel, I h_stride, I h_padding, I w_size, I w_out, I w_kernel,       \
        I w_stride, I w_padding
#define MAKE_AXES                                                                 \
    const Axis D = {d_size, d_out, d_kernel, d_stride, d_padding};                \
    const Axis H = {h_size, h_out, h_kernel, h_stride, h_padding};                \
    const Axis W = {w_size, w_out, w_kernel, w_stride, w_padding};
"""
)


def geometry(image: Sequence[int], out: Sequence[int], attrs: Attrs) -> list[int]:
    """Return the arguments AXES of a kernel, for shapes (N, C, *spatial)."""
    names = ("kernel", "stride", "padding")
    axes = list(zip(image[2:], out[2:], *(attrs[n] for n in names), strict=True))
    axes = [_ABSENT] * (3 - len(axes)) + axes
    return [number for axis in axes for number in axis]


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


def avg_pool(call: KernelCall) -> None:
    """Compute the mean of each window."""
    (x,), (y,) = call.inputs, call.outputs
    if _is_global(x.shape, y.shape, call.attrs):
        pixels = math.prod(x.shape[2:])
        width = min(THREADS, 1 << (pixels.bit_length() - 1))
        blocks = flat(y.size * width)
        call.launch(
            AVERAGE_POOLING_PROGRAM, "image_means", blocks, x, y, y.size, pixels, width
        )
        return
    arguments = y.size, int(call.attrs["count_include_pad"])
    axes = geometry(x.shape, y.shape, call.attrs)
    call.launch(
        AVERAGE_POOLING_PROGRAM, "avg_pool", walking(y.size), x, y, *arguments, *axes
    )


def avg_pool_grad(call: KernelCall) -> None:
    """Compute dx by distributing each dy over the elements of its window."""
    (dy,), (dx,) = call.inputs, call.outputs
    arguments = dx.size, int(call.attrs["count_include_pad"])
    axes = geometry(dx.shape, dy.shape, call.attrs)
    call.launch(
        AVERAGE_POOLING_PROGRAM,
        "avg_pool_grad",
        walking(dx.size),
        dy,
        dx,
        *arguments,
        *axes,
    )


AVERAGE_POOLING_PROGRAM = Program(
    WINDOWS
    + r"""
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
"""
)


def _is_global(image: tuple[int, ...], out: tuple[int, ...], attrs: Attrs) -> bool:
    """Return whether each window is a whole image."""
    return (
        math.prod(out[2:]) == 1
        and tuple(attrs["kernel"]) == tuple(image[2:])
        and not any(attrs["padding"])
    )


# Max pooling, with the position of each maximum in its window, and its gradient.
#
# A thread computes one result, or with channels last as many as fill a memory access.
# In the gradient results are elements of the image, gathered in order from the windows
# that contain them.


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
"""
)


OPERATIONS: dict[str, Operation] = {
    "avg_pool": Operation(avg_pool),
    "avg_pool_grad": Operation(avg_pool_grad),
    "max_pool": Operation(max_pool),
    "max_pool_grad": Operation(max_pool_grad),
}
