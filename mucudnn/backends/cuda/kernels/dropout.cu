#include "prelude.cuh"

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
