// A block has 32 channels.
KERNEL finish_channels(T* out, const double* parts, I count, I C) {
    I c = blockIdx.x * 32 + threadIdx.x % 32;
    double sum = lane_total(parts, count, C, c, 32);
    if (threadIdx.x < 32 && c < C) out[c] = (T)sum;
}
