#include "prelude.cuh"

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
