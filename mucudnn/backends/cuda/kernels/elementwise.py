"""Elementwise kernels: activations, sums, products, dropout, reshaping copies.

Elementwise: a thread accesses 16 bytes of each tensor at once if they are aligned, and
the remainder element by element.

Layouts, between channels first and last: a block moves squares of 32 x 32 elements
through shared memory, so that both reads and writes are contiguous; an extra column per
row avoids bank conflicts. For few rows or columns, such as the colours of an image,
squares would be nearly empty: there a thread moves all elements of one pixel.

Dropout with the CPU's masks: Philox 4x64 (Salmon et al., 2011), ten rounds. Block b of
65536 positions has the key (seed, step); its n-th encryption, from 1, is that of the
counter (n, b, 0, 0) and yields sixteen numbers of 16 bits. A thread computes one
encryption; then the block of threads writes the results, adjacent threads at adjacent
elements.
"""

import math
from collections.abc import Sequence

from mucudnn.backends.cuda.kernels.launch import (
    THREADS,
    KernelCall,
    Operation,
    Program,
    flat,
)
from mucudnn.backends.tensor_copies import SHAPING, Copies

ELEMENTWISE = Program.load("kernels/elementwise.cu")
TRANSPOSE = Program.load("kernels/transpose.cu")
DROPOUT = Program.load("kernels/dropout.cu")
_PACK_BYTES = 16
_ATTRIBUTES = {
    "leaky_relu": ("slope",),
    "leaky_relu_grad": ("slope",),
    "scale": ("factor",),
}

_SIDE = 32  # of a square
_FEW = 8  # most rows or columns that a thread moves
_MOST_IMAGES = 65535  # blocks along a grid's second axis
_MOST_BLOCKS = 1 << 16
_WORD = 1 << 64
_AT_ONCE = 16 * THREADS  # positions of a mask per block of threads
_MOST_RUNS = 65535  # blocks along a grid's second axis


def _elementwise(kernel: str) -> Operation:
    """Make an operation of one or two tensors, and attributes."""
    names = _ATTRIBUTES.get(kernel, ())

    def run(call: KernelCall) -> None:
        (y,) = call.outputs
        arguments = *call.inputs, y, y.size, *call.numbers(*names)
        packs = -(-y.nbytes // _PACK_BYTES)
        call.launch(ELEMENTWISE, kernel, flat(packs), *arguments)

    return Operation(run)


def _copying(copies: Copies) -> Operation:
    """Make an operation of copies of whole tensors or parts, by CuPy's assignments."""

    def run(call: KernelCall) -> None:
        for source, target in copies(call.inputs, call.outputs[0], call.attrs):
            call.gpu.copy(source, target)

    return Operation(run)


def to_channels_first(call: KernelCall) -> None:
    """Copy (N, *spatial, C) to (N, C, *spatial)."""
    n, *spatial, c = call.inputs[0].shape
    _transpose(call, (n, math.prod(spatial), c))


def to_channels_last(call: KernelCall) -> None:
    """Copy (N, C, *spatial) to (N, *spatial, C)."""
    n, c, *spatial = call.inputs[0].shape
    _transpose(call, (n, c, math.prod(spatial)))


def _transpose(call: KernelCall, shape: Sequence[int]) -> None:
    """Transpose each of n matrices, for a shape (n, rows, columns)."""
    (x,), (y,) = call.inputs, call.outputs
    n, rows, columns = shape
    few, many = sorted((rows, columns))
    if few <= _FEW < many:
        arguments = x, y, n, few, many, int(rows == few)
        blocks = *flat(many), min(n, _MOST_IMAGES)
        call.launch(TRANSPOSE, "transpose_few", blocks, *arguments)
        return
    squares = n * -(-rows // _SIDE) * -(-columns // _SIDE)
    call.launch(TRANSPOSE, "transpose", (min(squares, _MOST_BLOCKS),), x, y, *shape)


def dropout(call: KernelCall) -> None:
    """Compute y = x / (1 - p) or, with probability p, 0.

    A row slice of a tensor begins at position `offset` of the tensor. Slices of images
    are runs of `run` elements, whose starts are `apart` positions distant.
    """
    import numpy as np

    (x, step), (y,) = call.inputs, call.outputs
    p = call.attrs["p"]
    if p >= 1:
        call.gpu.copy(0, y)
        return
    seed = np.uint64(call.attrs["seed"] % _WORD)
    threshold = min(round(p * 65536), 65535)
    offset = call.attrs.get("offset", 0)
    run = call.attrs.get("run", x.size)
    apart = call.attrs.get("apart", run)
    across = min(1 << 16, -(-(run + 15) // _AT_ONCE))
    sources, targets = (v.reshape(-1, max(1, run)) for v in (x, y))
    # The second axis of a grid is limited: more runs take several launches.
    for first in range(0, sources.shape[0], _MOST_RUNS):
        source, target = (v[first : first + _MOST_RUNS] for v in (sources, targets))
        begin = np.uint64(offset + first * apart)
        arguments = run, seed, threshold, 1 / (1 - p), begin, np.uint64(apart)
        blocks = across, source.shape[0]
        call.launch(DROPOUT, "dropout", blocks, source, step, target, *arguments)


OPERATIONS: dict[str, Operation] = {
    **{
        # `tanh_` would hide the function of C that it calls.
        kernel.removesuffix("_"): _elementwise(kernel)
        for kernel in ELEMENTWISE.kernels
    },
    **{name: _copying(copies) for name, copies in SHAPING.items()},
    "to_channels_first": Operation(to_channels_first),
    "to_channels_last": Operation(to_channels_last),
    "dropout": Operation(dropout),
}
