#include "prelude.cuh"

KERNEL sum_parts(const T* part, A* sum, T* out, I count, int first, int accumulate) {
    EACH(i, count) {
        A before = first ? (accumulate ? (A)out[i] : (A)0) : sum[i];
        A after = before + (A)part[i];
        sum[i] = after;
        out[i] = (T)after;
    }
}
