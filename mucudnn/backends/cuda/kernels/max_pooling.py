"""Max pooling, with the position of each maximum in its window, and its gradient.

A thread has one result: in the gradient an element of the image, which gathers from
the windows that hold it, in their order.
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
// Padding is never chosen. NaN is above all numbers.
KERNEL max_pool(const T* x, T* y, unsigned char* index, I count, AXES) {
    MAKE_AXES
    EACH_AT(at, count, W.out, H.out, D.out) {
        I ow = at.w, oh = at.h, od = at.d;
        const T* image = x + at.image * D.size * H.size * W.size;
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
        y[at.i] = (T)best;
        index[at.i] = chosen;
    }
}

KERNEL max_pool_grad(const T* dy, const unsigned char* index, T* dx, I count, AXES) {
    MAKE_AXES
    EACH_AT(at, count, W.size, H.size, D.size) {
        I w = at.w, h = at.h, d = at.d, image = at.image * D.out * H.out * W.out;
        A sum = 0;
        for (I od = D.earliest(d); od < D.past(d); ++od)
            for (I oh = H.earliest(h); oh < H.past(h); ++oh)
                for (I ow = W.earliest(w); ow < W.past(w); ++ow) {
                    I tap = ((d - D.origin(od)) * H.kernel + h - H.origin(oh)) *
                                W.kernel + w - W.origin(ow);
                    I o = image + (od * H.out + oh) * W.out + ow;
                    if (index[o] == tap) sum += (A)dy[o];
                }
        dx[at.i] = (T)sum;
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
    call.launch(PROGRAM, "max_pool", walking(y.size), x, y, index, y.size, *axes)


def max_pool_grad(call: KernelCall) -> None:
    """Dx: each dy at its maximum's place."""
    (dy, index), (dx,) = call.inputs, call.outputs
    axes = geometry(dx.shape, dy.shape, call.attrs)
    arguments = dy, index, dx, dx.size, *axes
    call.launch(PROGRAM, "max_pool_grad", walking(dx.size), *arguments)


OPERATIONS: dict[str, Operation] = {
    "max_pool": Operation(max_pool),
    "max_pool_grad": Operation(max_pool_grad),
}
