"""Enlarging images by whole factors: nearest and (bi-, tri-)linear, with gradients.

Linear: pixel i s + k of the result lies f = (k + 1/2) / s - 1/2 from pixel i of the
image, so it is (1 - |f|) of it and |f| of its neighbour on that side, at the border of
itself. A thread has one result; gradients gather from the pixels that theirs has gone
into.
"""

from mucudnn.backends.cuda.kernels.program import KernelCall, Operation, Program, flat

__all__ = ["OPERATIONS", "PROGRAM"]

PROGRAM = Program(
    r"""
// One axis: pixels of the small image, and the factor.
struct Axis {
    I size, scale;
    __device__ I large() const { return size * scale; }
    __device__ A offset(I o) const {
        return ((A)(o % scale) + (A)0.5) / scale - (A)0.5;
    }
    // The pixel that o takes |offset| of.
    __device__ I neighbour(I o) const {
        I i = o / scale;
        A f = offset(o);
        if (f < 0) return i > 0 ? i - 1 : 0;
        return f > 0 && i < size - 1 ? i + 1 : i;
    }
    // How much of pixel i there is in o.
    __device__ A weight(I o, I i) const {
        A f = offset(o) < 0 ? -offset(o) : offset(o);
        return (o / scale == i ? 1 - f : (A)0) + (neighbour(o) == i ? f : (A)0);
    }
    // Results that pixel i has gone into: from `first` to before `end`.
    __device__ I first(I i) const { return i > 0 ? i * scale - scale / 2 : 0; }
    __device__ I end(I i) const {
        return i < size - 1 ? (i + 1) * scale + scale / 2 : large();
    }
};
#define AXES I d_size, I d_scale, I h_size, I h_scale, I w_size, I w_scale
#define MAKE_AXES                                                                 \
    const Axis D = {d_size, d_scale}, H = {h_size, h_scale}, W = {w_size, w_scale};
// The place of element i of large images, and where its small image begins.
#define LARGE_PLACE                                                               \
    I w = i % W.large(), h = i / W.large() % H.large();                           \
    I d = i / W.large() / H.large() % D.large();                                  \
    I image = i / W.large() / H.large() / D.large() * D.size * H.size * W.size;
#define SMALL_PLACE                                                               \
    I w = i % W.size, h = i / W.size % H.size, d = i / W.size / H.size % D.size;  \
    I image = i / W.size / H.size / D.size * D.large() * H.large() * W.large();

KERNEL upsample_nearest(const T* x, T* y, I count, AXES) {
    MAKE_AXES
    EACH(i, count) {
        LARGE_PLACE
        y[i] = x[image + (d / D.scale * H.size + h / H.scale) * W.size + w / W.scale];
    }
}

KERNEL upsample_nearest_grad(const T* dy, T* dx, I count, AXES) {
    MAKE_AXES
    EACH(i, count) {
        SMALL_PLACE
        A sum = 0;
        for (I od = d * D.scale; od < (d + 1) * D.scale; ++od)
            for (I oh = h * H.scale; oh < (h + 1) * H.scale; ++oh)
                for (I ow = w * W.scale; ow < (w + 1) * W.scale; ++ow)
                    sum += (A)dy[image + (od * H.large() + oh) * W.large() + ow];
        dx[i] = (T)sum;
    }
}

KERNEL upsample_bilinear(const T* x, T* y, I count, AXES) {
    MAKE_AXES
    EACH(i, count) {
        LARGE_PLACE
        const T* from = x + image;
        I d0 = d / D.scale, h0 = h / H.scale, w0 = w / W.scale;
        I d1 = D.neighbour(d), h1 = H.neighbour(h), w1 = W.neighbour(w);
        A fd = D.offset(d), fh = H.offset(h), fw = W.offset(w);
        fd = fd < 0 ? -fd : fd;
        fh = fh < 0 ? -fh : fh;
        fw = fw < 0 ? -fw : fw;
        A sum = 0;
        for (int corner = 0; corner < 8; ++corner) {
            I id = corner & 4 ? d1 : d0, ih = corner & 2 ? h1 : h0;
            I iw = corner & 1 ? w1 : w0;
            A part = (corner & 4 ? fd : 1 - fd) * (corner & 2 ? fh : 1 - fh) *
                     (corner & 1 ? fw : 1 - fw);
            if (part != 0) sum += part * (A)from[(id * H.size + ih) * W.size + iw];
        }
        y[i] = (T)sum;
    }
}

KERNEL upsample_bilinear_grad(const T* dy, T* dx, I count, AXES) {
    MAKE_AXES
    EACH(i, count) {
        SMALL_PLACE
        A sum = 0;
        for (I od = D.first(d); od < D.end(d); ++od)
            for (I oh = H.first(h); oh < H.end(h); ++oh) {
                A row = 0;
                for (I ow = W.first(w); ow < W.end(w); ++ow)
                    row += W.weight(ow, w) *
                           (A)dy[image + (od * H.large() + oh) * W.large() + ow];
                sum += D.weight(od, d) * H.weight(oh, h) * row;
            }
        dx[i] = (T)sum;
    }
}
"""
)


def _resampling(kernel: str, *, gradient: bool) -> Operation:
    """An operation between a small image and a large one."""

    def run(call: KernelCall) -> None:
        (given,), (made,) = call.inputs, call.outputs
        small = made if gradient else given
        axes = list(zip(small.shape[2:], call.attrs["scale"], strict=True))
        axes = [(1, 1)] * (3 - len(axes)) + axes
        numbers = (number for axis in axes for number in axis)
        blocks = flat(made.size)
        call.launch(PROGRAM, kernel, blocks, given, made, made.size, *numbers)

    return Operation(run)


OPERATIONS: dict[str, Operation] = {
    "upsample_bilinear": _resampling("upsample_bilinear", gradient=False),
    "upsample_bilinear_grad": _resampling("upsample_bilinear_grad", gradient=True),
    "upsample_nearest": _resampling("upsample_nearest", gradient=False),
    "upsample_nearest_grad": _resampling("upsample_nearest_grad", gradient=True),
}
