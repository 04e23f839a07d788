"""Windows over images of up to three axes, which kernels always see as three: D, H, W.

A thread computes the axes' indices of its first element by dividing, and those of the
next ones by adding: GPUs have no instruction that divides whole numbers.
"""

from collections.abc import Sequence

from mucudnn.backends.cuda.kernels.program import Attrs

__all__ = ["WALK", "WINDOWS", "geometry"]

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
// Computes, for each position of an image, a sum over the windows that contain it, in
// order. `add(sums, at, o, od, oh, ow)` adds one window: result `o`, at these indices.
// A thread has V neighbours in the same windows, or one position.
template <int V, class F>
__device__ void gather(T* dx, I count, const Axis& D, const Axis& H, const Axis& W,
                       const F& add) {
    for (Walk at(W.size / V, H.size, D.size); at.i < count / V; at.next()) {
        I w = at.w * V, image = at.image * D.out * H.out * W.out;
        Windows ds(D, at.d), hs(H, at.h);
        Windows ws = V > 1 ? Windows{w, w + 1} : Windows(W, w);
        A sums[V] = {};
        for (I od = ds.first; od < ds.end; ++od)
            for (I oh = hs.first; oh < hs.end; ++oh)
#pragma unroll 1
                for (I ow = ws.first; ow < ws.end; ow += V)
                    add(sums, at, image + (od * H.out + oh) * W.out + ow, od, oh, ow);
        Pack<T, V> made;
        for (int j = 0; j < V; ++j) made.at[j] = (T)sums[j];
        store(dx + at.i * V, made);
    }
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
