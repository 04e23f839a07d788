// True in the last block of these channels to finish: all sums are written then.
// Counters, one for each place along x, are 0 before and after.
__device__ bool is_last(long long* arrived) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned long long* count = (unsigned long long*)arrived + blockIdx.x;
        last = atomicAdd(count, 1ull) == gridDim.y - 1;
        if (last) *count = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// The channel whose parts a thread of the last block adds up, with other threads.
template <int CH> struct Gathering {
    I C, place, threads, c;
    __device__ Gathering(I C, I width)
        : C(C), place(threadIdx.x & (width * CH - 1)), threads(width * CH),
          c((I)blockIdx.x * threads + place) {}
    __device__ bool leads() const { return threadIdx.x < threads && c < C; }
    // Sums all parts, bypassing caches that are not coherent with other blocks' writes;
    // many reads are issued before the first addition to hide their latency.
    __device__ double sum(const double* parts) const {
        const int AHEAD = 16;
        double sum = 0;
        I step = THREADS / threads, last = c < C ? (I)gridDim.y : 0;
        for (I part = threadIdx.x / threads; part < last; part += AHEAD * step) {
            double read[AHEAD];
#pragma unroll
            for (int turn = 0; turn < AHEAD; ++turn)
                read[turn] = part + turn * step < last
                                 ? __ldcg(parts + (part + turn * step) * C + c)
                                 : 0;
#pragma unroll
            for (int turn = 0; turn < AHEAD; ++turn) sum += read[turn];
        }
        return lane_sum(sum, threads);
    }
    // Replaces the first part by the sum of all.
    __device__ void merge(double* parts) const {
        double found = sum(parts);
        if (leads()) parts[c] = found;
    }
};
