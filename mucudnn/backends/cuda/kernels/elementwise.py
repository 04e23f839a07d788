"""Elementwise kernels: activations, sums, products, dropout, reshaping copies.

A thread accesses 16 bytes of each tensor at once if they are aligned, and the remainder
element by element.
"""

import math
from collections.abc import Sequence

from mucudnn.backends.cuda.kernels.launch import KernelCall, Operation, flat
from mucudnn.backends.cuda.kernels.source import THREADS, Program
from mucudnn.backends.tensor_copies import SHAPING, Copies

PROGRAM = Program(
    r"""
template <int W, class F>
__device__ void span(const T* a, const T* b, T* y, I first, I stop, const F& formula) {
    I thread = (I)blockIdx.x * THREADS + threadIdx.x, step = (I)gridDim.x * THREADS * W;
    for (I i = first + thread * W; i < stop; i += step) {
        Pack<T, W> x = load<W>(a + i), d = load<W>(b + i);
        for (int j = 0; j < W; ++j)
            x.at[j] = (T)formula((A)x.at[j], (A)d.at[j]);
        store(y + i, x);
    }
}
template <class F>
__device__ void map(const T* a, const T* b, T* y, I count, const F& formula) {
    bool packed = aligned(a) && aligned(b) && aligned(y);
    I whole = packed ? count / PACKED * PACKED : 0;
    span<PACKED>(a, b, y, 0, whole, formula);
    span<1>(a, b, y, whole, count, formula);
}
// A single tensor is passed as both inputs; the compiler merges the two reads.
#define ONE(formula) map(a, a, y, count, [=](A x, A) -> A { return formula; });
#define TWO(formula) map(a, b, y, count, [=](A x, A d) -> A { return formula; });

// The probability that a standard normal variable is below x, and its density.
__device__ A below(A x) { return (A)0.5 * (1 + erf(x * (A)0.70710678118654752)); }
__device__ A density(A x) {
    return (A)0.39894228040143268 * exp((A)-0.5 * x * x);
}

KERNEL add(const T* a, const T* b, T* y, I count) { TWO(x + d) }
KERNEL multiply(const T* a, const T* b, T* y, I count) { TWO(x * d) }
KERNEL scale(const T* a, T* y, I count, double factor) { ONE(x * (A)factor) }

KERNEL relu(const T* a, T* y, I count) { ONE(x > 0 || x != x ? x : (A)0) }
KERNEL add_relu(const T* a, const T* b, T* y, I count) {
    TWO(x + d > 0 || x + d != x + d ? x + d : (A)0)
}
KERNEL relu_grad(const T* a, const T* b, T* y, I count) { TWO(x != 0 ? d : (A)0) }

KERNEL leaky_relu(const T* a, T* y, I count, double slope) {
    ONE(x > 0 ? x : (A)slope * x)
}
KERNEL leaky_relu_grad(const T* a, const T* b, T* y, I count, double slope) {
    TWO(x > 0 ? d : (A)slope * d)
}

KERNEL gelu(const T* a, T* y, I count) { ONE(x * below(x)) }
KERNEL gelu_grad(const T* a, const T* b, T* y, I count) {
    TWO(d * (below(x) + x * density(x)))
}

KERNEL sigmoid(const T* a, T* y, I count) { ONE(1 / (1 + exp(-x))) }
KERNEL sigmoid_grad(const T* a, const T* b, T* y, I count) { TWO(d * x * (1 - x)) }

KERNEL tanh_(const T* a, T* y, I count) { ONE(tanh(x)) }
KERNEL tanh_grad(const T* a, const T* b, T* y, I count) { TWO(d * (1 - x * x)) }
"""
)


_PACK_BYTES = 16


def _elementwise(kernel: str, *names: str) -> Operation:
    """Make an operation of one or two tensors and the named attributes."""

    def run(call: KernelCall) -> None:
        (y,) = call.outputs
        arguments = *call.inputs, y, y.size, *call.numbers(*names)
        packs = -(-y.nbytes // _PACK_BYTES)
        call.launch(PROGRAM, kernel, flat(packs), *arguments)

    return Operation(run)


_ATTRIBUTES = {
    "leaky_relu": ("slope",),
    "leaky_relu_grad": ("slope",),
    "scale": ("factor",),
}


# Copies of whole tensors and of parts, and constants; by CuPy's assignments.
#
# They run on the current stream and need no memory besides the output.


def _operation(copies: Copies) -> Operation:
    def run(call: KernelCall) -> None:
        for source, target in copies(call.inputs, call.outputs[0], call.attrs):
            call.gpu.copy(source, target)

    return Operation(run)


def to_channels_first(call: KernelCall) -> None:
    """Copy (N, *spatial, C) to (N, C, *spatial)."""
    n, *spatial, c = call.inputs[0].shape
    _transposed(call, (n, math.prod(spatial), c))


def to_channels_last(call: KernelCall) -> None:
    """Copy (N, C, *spatial) to (N, *spatial, C)."""
    n, c, *spatial = call.inputs[0].shape
    _transposed(call, (n, c, math.prod(spatial)))


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
    parts = [v.reshape(-1, max(1, run)) for v in (x, y)]
    for first in range(0, parts[0].shape[0], _MOST_RUNS):
        here = [v[first : first + _MOST_RUNS] for v in parts]
        begin = np.uint64(offset + first * apart)
        arguments = run, seed, threshold, 1 / (1 - p), begin, np.uint64(apart)
        blocks = across, here[0].shape[0]
        call.launch(
            DROPOUT_PROGRAM, "dropout", blocks, here[0], step, here[1], *arguments
        )


# Layout conversions between channels first and last: one transposition per sample.
#
# A block moves squares of 32 x 32 elements through shared memory, so that both reads
# and writes are contiguous; an extra column per row avoids bank conflicts. For few rows
# or columns, such as the colours of an image, squares would be nearly empty: there a
# thread moves all elements of one pixel.


_SIDE = 32

_FEW = 8

_MOST_IMAGES = 65535  # blocks along a grid's second axis

_MOST_BLOCKS = 1 << 16


TURNING_PROGRAM = Program(
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


def _transposed(call: KernelCall, shape: Sequence[int]) -> None:
    (x,), (y,) = call.inputs, call.outputs
    n, rows, columns = shape
    few, many = sorted((rows, columns))
    if few <= _FEW < many:
        arguments = x, y, n, few, many, int(rows == few)
        blocks = *flat(many), min(n, _MOST_IMAGES)
        call.launch(TURNING_PROGRAM, "transpose_few", blocks, *arguments)
        return
    squares = n * -(-rows // _SIDE) * -(-columns // _SIDE)
    call.launch(
        TURNING_PROGRAM, "transpose", (min(squares, _MOST_BLOCKS),), x, y, *shape
    )


# Dropout with the CPU's masks: Philox 4x64 (Salmon et al., 2011), ten rounds.
#
# Block b of 65536 positions has the key (seed, step); its n-th encryption, from 1, is
# that of the counter (n, b, 0, 0) and yields sixteen numbers of 16 bits. A thread
# computes one encryption; then the block of threads writes the results, adjacent
# threads at adjacent elements.


_WORD = 1 << 64

_AT_ONCE = 16 * THREADS  # positions per block of threads

_MOST_RUNS = 65535  # blocks along a grid's second axis


DROPOUT_PROGRAM = Program(
    r"""
typedef unsigned long long Word;
#define POSITIONS 65536  // under one key and counter: part of a mask's definition

__device__ void philox(Word* c, Word key0, Word key1) {
    for (int round = 0; round < 10; ++round) {
        const Word by0 = 0xD2E7470EE14C6C93ull, by1 = 0xCA5A826395121157ull;
        Word high0 = __umul64hi(by0, c[0]), low0 = by0 * c[0];
        Word high1 = __umul64hi(by1, c[2]), low1 = by1 * c[2];
        Word c0 = high1 ^ c[1] ^ key0, c2 = high0 ^ c[3] ^ key1;
        c[0] = c0;
        c[1] = low1;
        c[2] = c2;
        c[3] = low0;
        key0 += 0x9E3779B97F4A7C15ull;
        key1 += 0xBB67AE8584CAA73Bull;
    }
}

KERNEL dropout(const T* x, const long long* step, T* y, I count, Word seed,
               I threshold, double factor, Word offset, Word apart) {
    __shared__ unsigned short chosen[THREADS];  // a bit for each of 16 positions
    x += (I)blockIdx.y * count;
    y += (I)blockIdx.y * count;
    offset += blockIdx.y * apart;
    // Rows of a tensor begin anywhere among the sixteen numbers of an encryption.
    int before = (int)(offset % 16);
    long long runs = (count + before + 16ll * THREADS - 1) / (16 * THREADS);
    for (long long run = blockIdx.x; run < runs; run += gridDim.x) {
        long long start = run * 16 * THREADS - before;
        Word position = offset + start + 16 * threadIdx.x;
        Word c[4] = {position % POSITIONS / 16 + 1, position / POSITIONS, 0, 0};
        philox(c, seed, (Word)*step);
        unsigned int bits = 0;
        for (int i = 0; i < 16; ++i)
            bits |= (unsigned int)((I)(c[i / 4] >> (i % 4 * 16) & 0xffff) >= threshold)
                    << i;
        chosen[threadIdx.x] = bits;
        __syncthreads();
        for (int i = threadIdx.x; i < 16 * THREADS && start + i < count; i += THREADS)
            if (start + i >= 0)
                y[start + i] = chosen[i / 16] >> (i % 16) & 1
                               ? (T)((A)x[start + i] * (A)factor)
                               : (T)(A)0;
        __syncthreads();
    }
}
"""
)


OPERATIONS: dict[str, Operation] = {
    **{
        kernel.removesuffix("_"): _elementwise(kernel, *_ATTRIBUTES.get(kernel, ()))
        for kernel in PROGRAM.kernels
    },
    **{name: _operation(copies) for name, copies in SHAPING.items()},
    "to_channels_first": Operation(to_channels_first),
    "to_channels_last": Operation(to_channels_last),
    "dropout": Operation(dropout),
}
