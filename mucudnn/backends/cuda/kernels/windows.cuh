#include "walk.cuh"

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
