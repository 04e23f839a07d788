"""Layout conversions between channels first and last: one transposition per sample.

A block moves squares of 32 x 32 elements through shared memory, so that both reads and
writes are contiguous; an extra column per row avoids bank conflicts. For few rows or
columns, such as the colours of an image, squares would be nearly empty: there a thread
moves all elements of one pixel.
"""

import math
from collections.abc import Sequence

from mucudnn.backends.cuda.kernels.program import KernelCall, Operation, Program, flat

__all__ = ["OPERATIONS", "PROGRAM"]

_SIDE = 32
_FEW = 8
_MOST_IMAGES = 65535  # blocks along a grid's second axis
_MOST_BLOCKS = 1 << 16

PROGRAM = Program(
    r"""
KERNEL transpose(const T* x, T* y, I N, I rows, I columns) {
    __shared__ T square[32][33];
    I across = (columns + 31) / 32, down = (rows + 31) / 32;
    I lane = threadIdx.x % 32, first = threadIdx.x / 32;
    for (I number = blockIdx.x; number < N * down * across; number += gridDim.x) {
        I column = number % across * 32, row = number / across % down * 32;
        I matrix = number / across / down * rows * columns;
        for (I k = first; k < 32; k += THREADS / 32)
            if (row + k < rows && column + lane < columns)
                square[k][lane] = x[matrix + (row + k) * columns + column + lane];
        __syncthreads();
        for (I k = first; k < 32; k += THREADS / 32)
            if (column + k < columns && row + lane < rows)
                y[matrix + (column + k) * rows + row + lane] = square[lane][k];
        __syncthreads();
    }
}

// Matrices of a few rows, or of a few columns, with `many` of the others.
KERNEL transpose_few(const T* x, T* y, I N, I few, I many, I rows_are_few) {
    for (I matrix = blockIdx.y; matrix < N; matrix += gridDim.y) {
        const T* from = x + matrix * few * many;
        T* to = y + matrix * few * many;
        EACH(i, many)
            for (I j = 0; j < few; ++j) {
                I apart = j * many + i, beside = i * few + j;
                to[rows_are_few ? beside : apart] = from[rows_are_few ? apart : beside];
            }
    }
}
"""
)


def to_channels_last(call: KernelCall) -> None:
    """Copy (N, C, *spatial) to (N, *spatial, C)."""
    n, c, *spatial = call.inputs[0].shape
    _transposed(call, (n, c, math.prod(spatial)))


def to_channels_first(call: KernelCall) -> None:
    """Copy (N, *spatial, C) to (N, C, *spatial)."""
    n, *spatial, c = call.inputs[0].shape
    _transposed(call, (n, math.prod(spatial), c))


def _transposed(call: KernelCall, shape: Sequence[int]) -> None:
    (x,), (y,) = call.inputs, call.outputs
    n, rows, columns = shape
    few, many = sorted((rows, columns))
    if few <= _FEW < many:
        arguments = x, y, n, few, many, int(rows == few)
        blocks = *flat(many), min(n, _MOST_IMAGES)
        call.launch(PROGRAM, "transpose_few", blocks, *arguments)
        return
    squares = n * -(-rows // _SIDE) * -(-columns // _SIDE)
    call.launch(PROGRAM, "transpose", (min(squares, _MOST_BLOCKS),), x, y, *shape)


OPERATIONS: dict[str, Operation] = {
    "to_channels_first": Operation(to_channels_first),
    "to_channels_last": Operation(to_channels_last),
}
