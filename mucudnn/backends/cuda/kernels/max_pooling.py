"""Max pooling, with the position of each maximum in its window, and its gradient.

A thread has one result: in the gradient an element of the image, which gathers from
the windows that hold it, in their order.
"""

from mucudnn.backends.cuda.kernels.program import KernelCall, Operation, Program, flat
from mucudnn.backends.cuda.kernels.windows import WINDOWS, geometry

__all__ = ["OPERATIONS", "PROGRAM"]

PROGRAM = Program(
    WINDOWS
    + r"""
// Padding is never chosen. NaN is above all numbers.
KERNEL max_pool(const T* x, T* y, unsigned char* index, I count, AXES) {
    MAKE_AXES
    EACH(i, count) {
        I ow = i % W.out, oh = i / W.out % H.out, od = i / W.out / H.out % D.out;
        const T* image = x + i / W.out / H.out / D.out * D.size * H.size * W.size;
        A best = -(A)INFINITY;
        int chosen = -1;
        for (I d = D.first(od); d < D.end(od); ++d)
            for (I h = H.first(oh); h < H.end(oh); ++h)
                for (I w = W.first(ow); w < W.end(ow); ++w) {
                    A value = (A)image[(d * H.size + h) * W.size + w];
                    bool above = value > best || (value != value && best == best);
                    if (chosen >= 0 && !above) continue;
                    best = value;
                    chosen = ((d - D.origin(od)) * H.kernel + h - H.origin(oh)) *
                                 W.kernel + w - W.origin(ow);
                }
        y[i] = (T)best;
        index[i] = chosen;
    }
}

KERNEL max_pool_grad(const T* dy, const unsigned char* index, T* dx, I count, AXES) {
    MAKE_AXES
    EACH(i, count) {
        I w = i % W.size, h = i / W.size % H.size, d = i / W.size / H.size % D.size;
        I image = i / W.size / H.size / D.size * D.out * H.out * W.out;
        A sum = 0;
        for (I od = D.earliest(d); od < D.past(d); ++od)
            for (I oh = H.earliest(h); oh < H.past(h); ++oh)
                for (I ow = W.earliest(w); ow < W.past(w); ++ow) {
                    I tap = ((d - D.origin(od)) * H.kernel + h - H.origin(oh)) *
                                W.kernel + w - W.origin(ow);
                    I o = image + (od * H.out + oh) * W.out + ow;
                    if (index[o] == tap) sum += (A)dy[o];
                }
        dx[i] = (T)sum;
    }
}
"""
)


def max_pool(call: KernelCall) -> None:
    """(y, index): the maximum, and which of the window's elements it is.

    Of equal maxima the first counts; if one is NaN, so is the maximum.
    """
    (x,), (y, index) = call.inputs, call.outputs
    axes = geometry(x.shape, y.shape, call.attrs)
    call.launch(PROGRAM, "max_pool", flat(y.size), x, y, index, y.size, *axes)


def max_pool_grad(call: KernelCall) -> None:
    """Dx: each dy at its maximum's place."""
    (dy, index), (dx,) = call.inputs, call.outputs
    axes = geometry(dx.shape, dy.shape, call.attrs)
    call.launch(PROGRAM, "max_pool_grad", flat(dx.size), dy, index, dx, dx.size, *axes)


OPERATIONS: dict[str, Operation] = {
    "max_pool": Operation(max_pool),
    "max_pool_grad": Operation(max_pool_grad),
}
