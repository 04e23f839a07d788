#include "prelude.cuh"
#include "reduce.cuh"
#include "rows.cuh"

KERNEL group_norm_apply(const T* x, const P* gamma, const P* beta, const P* mean,
                        const P* inv_std, T* y, I groups, I length, I inner) {
    Row row(blockIdx.x, groups, length, inner, blockIdx.y, gridDim.y);
    A centre = (A)mean[blockIdx.x], inverse = (A)inv_std[blockIdx.x];
    normalise(row, x, gamma, beta, centre, inverse, y);
}

KERNEL group_norm_totals(const T* x, const T* dy, const P* gamma, const P* mean,
                         P* totals, I groups, I length, I inner) {
    Row row(blockIdx.x, groups, length, inner, 0, 1);
    RowSums sums(row, x, dy, gamma, (A)mean[blockIdx.x]);
    if (threadIdx.x != 0) return;
    totals[blockIdx.x] = (P)sums.sum;
    totals[gridDim.x + blockIdx.x] = (P)sums.dots;
}

KERNEL group_norm_grad_apply(const T* x, const T* dy, const P* gamma, const P* mean,
                             const P* inv_std, const P* totals, T* dx, I groups,
                             I length, I inner, double count) {
    Row row(blockIdx.x, groups, length, inner, blockIdx.y, gridDim.y);
    A centre = (A)mean[blockIdx.x], inverse = (A)inv_std[blockIdx.x];
    input_grad(row, x, dy, gamma, centre, inverse, (double)totals[blockIdx.x],
               (double)totals[gridDim.x + blockIdx.x], count, dx);
}
