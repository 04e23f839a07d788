"""Pooling, local response normalisation and upsampling, with their gradients.

The divisor of a window's sum is counted along each axis separately: elements inside the
image, or inside it and its padding, but never positions that exist only because the
number of windows was rounded up.

A thread computes one result, or with channels last as many as fill a memory access. In
a gradient results are elements of the image, gathered in order from the windows that
contain them. The gradients of both kinds keep loops of their own: a shared loop spills
registers.
"""

import math
from collections.abc import Sequence
from typing import Any

from mucudnn.backends.cuda.kernels.launch import (
    THREADS,
    Attrs,
    KernelCall,
    Operation,
    Program,
    Specs,
    as_ncs,
    flat,
    read_constant,
    walking,
)

MAXIMUM = Program.load("kernels/max_pooling.cu")
AVERAGE = Program.load("kernels/average_pooling.cu")
LRN = Program.load("kernels/lrn.cu")
UPSAMPLING = Program.load("kernels/upsampling.cu")
_ABSENT = (1, 1, 1, 1, 0)  # size, out, kernel, stride, padding of a missing axis


def _axes(image: Sequence[int], out: Sequence[int], attrs: Attrs) -> list[int]:
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
    axes = _axes(x.shape, y.shape, call.attrs)
    call.launch(MAXIMUM, "max_pool", walking(y.size), x, y, index, y.size, *axes)


def max_pool_grad(call: KernelCall) -> None:
    """Compute dx: each dy at the position of its maximum."""
    (dy, index), (dx,) = call.inputs, call.outputs
    arguments = dy, index, dx, dx.size, *_axes(dx.shape, dy.shape, call.attrs)
    call.launch(MAXIMUM, "max_pool_grad", walking(dx.size), *arguments)


def avg_pool(call: KernelCall) -> None:
    """Compute the mean of each window."""
    (x,), (y,) = call.inputs, call.outputs
    kernel, image = tuple(call.attrs["kernel"]), tuple(x.shape[2:])
    one_window = math.prod(y.shape[2:]) == 1 and kernel == image
    if one_window and not any(call.attrs["padding"]):
        pixels = math.prod(image)
        width = min(THREADS, 1 << (pixels.bit_length() - 1))
        arguments = x, y, y.size, pixels, width
        call.launch(AVERAGE, "image_means", flat(y.size * width), *arguments)
        return
    axes = _axes(x.shape, y.shape, call.attrs)
    arguments = x, y, y.size, int(call.attrs["count_include_pad"]), *axes
    call.launch(AVERAGE, "avg_pool", walking(y.size), *arguments)


def avg_pool_grad(call: KernelCall) -> None:
    """Compute dx by distributing each dy over the elements of its window."""
    (dy,), (dx,) = call.inputs, call.outputs
    axes = _axes(dx.shape, dy.shape, call.attrs)
    arguments = dy, dx, dx.size, int(call.attrs["count_include_pad"]), *axes
    call.launch(AVERAGE, "avg_pool_grad", walking(dx.size), *arguments)


# Local response normalisation across channels (Krizhevsky et al., 2012).
#
# y = x / d^beta, d = k + alpha / size * (sum of x² over neighbouring channels). A
# thread processes the channels of one pixel, or of neighbouring pixels that fill a
# memory access, in order, so values read for one channel are cached for the next. The
# gradient may overwrite dy on its way, so it saves the values that later channels need,
# the last `size` of dy y / d, in a ring: in shared memory, or in the workspace if that
# is too small. For images of few pixels, neighbouring threads process a pixel's
# channels.


_BLOCKS = 1024
_FEWEST = 8  # least channels per thread, to amortise locating its pixel
_SHARED_ROWS = read_constant("lrn.cu", "SHARED_ROWS")  # of the ring


def lrn(call: KernelCall) -> None:
    """Divide each element by a power of its neighbourhood's mean square."""
    x, y = call.inputs[0], call.outputs[0]
    N, C, S = as_ncs(x.shape)
    if S < _FEWEST:
        arguments = x, y, x.size, C, S, *_lrn_numbers(call)
        call.launch(LRN, "lrn_last", walking(x.size), *arguments)
        return
    (across,) = flat(N * S)
    parts = max(1, min(C // _FEWEST, _BLOCKS // max(1, across)))
    run = -(-C // parts)
    arguments = x, y, N * S, run, C, S, *_lrn_numbers(call)
    call.launch(LRN, "lrn", (across, -(-C // run) if run else 0), *arguments)


def lrn_grad(call: KernelCall) -> None:
    """Compute dx_i = dy_i / d_i^beta - 2 alpha beta / size x_i sum_j dy_j y_j / d_j."""
    N, C, S = as_ncs(call.inputs[0].shape)
    operands = *call.inputs, call.outputs[0], call.workspace
    arguments = *operands, N * S, C, S, *_lrn_numbers(call)
    call.launch(LRN, "lrn_grad", walking(N * S), *arguments)


def _lrn_numbers(call: KernelCall) -> tuple[Any, ...]:
    return call.attrs["size"], *call.numbers("alpha", "beta", "k")


def _ring(inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    """Return the bytes of the ring if it does not fit shared memory."""
    N, _, S = as_ncs(inputs[0].shape)
    size: int = attrs["size"]
    return 0 if size <= _SHARED_ROWS else 16 * size * walking(N * S)[0] * THREADS


# Upsampling by integer factors: nearest and (bi-, tri-)linear, with gradients.
#
# Linear: pixel i s + k of the result is f = (k + 1/2) / s - 1/2 from pixel i of the
# image, so it is the sum of (1 - |f|) of that pixel and |f| of its neighbour on that
# side, or of itself at the border. A thread has a pixel of the small image, or
# neighbours that fill a 16-byte access, and all pixels of the large image that depend
# on them, which it locates without dividing.


def _resampling(kernel: str) -> Operation:
    """Make an operation between a small image and a large one."""

    def run(call: KernelCall) -> None:
        (given,), (made,) = call.inputs, call.outputs
        small = made if kernel.endswith("_grad") else given
        axes = list(zip(small.shape[2:], call.attrs["scale"], strict=True))
        axes = [(1, 1)] * (3 - len(axes)) + axes
        numbers = (number for axis in axes for number in axis)
        blocks = walking(small.size)
        call.launch(UPSAMPLING, kernel, blocks, given, made, small.size, *numbers)

    return Operation(run)


OPERATIONS: dict[str, Operation] = {
    "avg_pool": Operation(avg_pool),
    "avg_pool_grad": Operation(avg_pool_grad),
    "lrn": Operation(lrn),
    "lrn_grad": Operation(lrn_grad, _ring),
    "max_pool": Operation(max_pool),
    "max_pool_grad": Operation(max_pool_grad),
    **{kernel: _resampling(kernel) for kernel in UPSAMPLING.kernels},
}
