"""Dropout with the CPU's masks: Philox 4x64 (Salmon et al., 2011), ten rounds.

Block b of 65536 positions has the key (seed, step); its n-th encryption, from 1, is
that of the counter (n, b, 0, 0) and yields sixteen numbers of 16 bits. A thread
computes one encryption; then the block of threads writes the results, adjacent threads
at adjacent elements.
"""

from mucudnn.backends.cuda.kernels.program import (
    THREADS,
    KernelCall,
    Operation,
    Program,
)

__all__ = ["OPERATIONS", "PROGRAM"]

_WORD = 1 << 64
_AT_ONCE = 16 * THREADS  # positions per block of threads
_MOST_RUNS = 65535  # blocks along a grid's second axis

PROGRAM = Program(
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
        call.launch(PROGRAM, "dropout", blocks, here[0], step, here[1], *arguments)


OPERATIONS: dict[str, Operation] = {"dropout": Operation(dropout)}
