// Threads of one lane, threadIdx.x % width, share a result; width is a power of two.
// Warps add in registers; all threads of a lane add the warps' sums.
__device__ double lane_sum(double value, I width) {
    __shared__ double sums[THREADS];
    I place = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int other = 16; other >= width; other /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, other);
    I lanes = width < 32 ? width : 32;
    __syncthreads();
    if (place < lanes) sums[warp * lanes + place] = value;
    __syncthreads();
    I left = width < 32 ? THREADS / 32 : THREADS / width;
    double sum = 0;
    for (I each = 0; each < left; ++each)
        sum += sums[each * width + (threadIdx.x & (width - 1))];
    return sum;
}
