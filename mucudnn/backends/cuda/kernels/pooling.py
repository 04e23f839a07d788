"""Average and maximum pooling, with their gradients.

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

from mucudnn.backends.cuda.kernels.launch import (
    Attrs,
    KernelCall,
    Operation,
    flat,
    walking,
)
from mucudnn.backends.cuda.kernels.source import THREADS, Program

MAXIMUM = Program.load("kernels/max_pooling.cu")
AVERAGE = Program.load("kernels/average_pooling.cu")
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
    axes = _axes(dx.shape, dy.shape, call.attrs)
    arguments = dy, index, dx, dx.size, *axes
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


OPERATIONS: dict[str, Operation] = {
    "avg_pool": Operation(avg_pool),
    "avg_pool_grad": Operation(avg_pool_grad),
    "max_pool": Operation(max_pool),
    "max_pool_grad": Operation(max_pool_grad),
}
