#include "prelude.cuh"
#include "table.cuh"

KERNEL accumulate(T* total, const P* part, I count, double factor) {
    EACH(i, count) total[i] = (T)((A)total[i] + (A)factor * (A)part[i]);
}
KERNEL accumulate_all(const long long* table, I rows, double factor) {
    Part part(table, rows);
    T* total = part.array<T>(0);
    const P* more = part.array<P>(1);
    for (I i = threadIdx.x; i < part.count; i += THREADS)
        total[i] = (T)((A)total[i] + (A)factor * (A)more[i]);
}

// Infinity minus itself is NaN. All threads that find one write the same value.
__device__ bool is_finite(T value) { return (A)value - (A)value == 0; }
KERNEL find_overflow(const T* gradient, long long* counts, I count) {
    EACH(i, count) if (!is_finite(gradient[i])) counts[0] = 1;
}
KERNEL find_overflow_all(const long long* table, long long* counts, I rows) {
    Part part(table, rows);
    const T* gradient = part.array<T>(0);
    for (I i = threadIdx.x; i < part.count; i += THREADS)
        if (!is_finite(gradient[i])) counts[0] = 1;
}

KERNEL adjust_loss_scale(T* scale, long long* counts, double growth, double backoff,
                         double least, double most, I interval) {
    if (threadIdx.x != 0 || blockIdx.x != 0) return;
    double next = (double)(A)scale[0];
    long long good = counts[1] + 1;
    if (counts[0]) {
        next = next * backoff < least ? least : next * backoff;
        counts[2] += 1;
        good = 0;
    } else if (good >= interval) {
        next = next * growth > most ? most : next * growth;
        good = 0;
    }
    scale[0] = (T)(A)next;
    counts[0] = 0;
    counts[1] = good;
}
