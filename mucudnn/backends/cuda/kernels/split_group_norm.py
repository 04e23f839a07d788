"""Group and layer normalisation of image strips, by blocks that share a group.

The moments of a strip's groups come from the kernels of batch normalisation, which see
the groups of all samples as the channels of one sample.
"""

import math

from mucudnn.backends.cuda.kernels.channels import Channels
from mucudnn.backends.cuda.kernels.group_norm import (
    ROWS,
    affine_grads,
    affine_workspace,
    rows,
)
from mucudnn.backends.cuda.kernels.program import (
    THREADS,
    Attrs,
    KernelCall,
    Operation,
    Program,
    Specs,
)
from mucudnn.backends.cuda.kernels.split_batch_norm import (
    all_moments,
    moments,
    statistics,
)
from mucudnn.backends.cuda.kernels.sums import REDUCE

__all__ = ["OPERATIONS", "PROGRAM"]

_FEWEST = 8  # least elements per thread for which another block pays off
_MOST_PARTS = 64

PROGRAM = Program(
    REDUCE
    + ROWS
    + r"""
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
"""
)


def group_norm_sums(call: KernelCall) -> None:
    """Compute (count, mean, sum of squares about it) of each group, (3, N, groups)."""
    moments(call, _as_channels(call.inputs, call.outputs))


def group_norm_merge(call: KernelCall) -> None:
    """Compute the mean and inv_std of each group."""
    # Groups have no running statistics: the outputs stand in and are not updated.
    all_moments(call, call.inputs, call.outputs, momentum=0.0, update=False)


def group_norm_apply(call: KernelCall) -> None:
    """Normalise a strip by the statistics of its image."""
    blocks, sizes = _parts(call)
    arguments = *call.inputs, *call.outputs, *sizes
    beside = call.inputs[1]
    call.launch(PROGRAM, "group_norm_apply", blocks, *arguments, beside=beside)


def group_norm_grad_sums(call: KernelCall) -> None:
    """Compute a strip's share of dgamma and dbeta, and of its groups' sums."""
    affine_grads(call, call.outputs[:2])
    (count, _), sizes = _parts(call)
    arguments = *call.inputs[:4], call.outputs[2], *sizes
    beside = call.inputs[3]
    call.launch(PROGRAM, "group_norm_totals", (count,), *arguments, beside=beside)


def group_norm_grad_apply(call: KernelCall) -> None:
    """Compute dx of a strip from the sums of its whole image."""
    blocks, sizes = _parts(call)
    arguments = *call.inputs, *call.outputs, *sizes, float(call.attrs["count"])
    beside = call.inputs[3]
    call.launch(PROGRAM, "group_norm_grad_apply", blocks, *arguments, beside=beside)


def _parts(call: KernelCall) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Return the grid (groups of all samples, blocks per group) and the sizes."""
    count, groups, length, inner = rows(call.inputs[0].shape, call.attrs)
    parts = min(_MOST_PARTS, max(1, length // (THREADS * _FEWEST)))
    return (count, parts), (groups, length, inner)


def _as_channels(inputs: Specs, outputs: Specs) -> Channels:
    """View the groups of all samples as the channels of one sample."""
    count = math.prod(outputs[0].shape[1:])
    return Channels.of((1, count, math.prod(inputs[0].shape) // count))


def _two_sums(inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    return 2 * _as_channels(inputs, outputs).nbytes


OPERATIONS: dict[str, Operation] = {
    "group_norm_apply": Operation(group_norm_apply),
    "group_norm_grad_apply": Operation(group_norm_grad_apply),
    "group_norm_grad_sums": Operation(group_norm_grad_sums, affine_workspace),
    "group_norm_merge": Operation(group_norm_merge, statistics),
    "group_norm_sums": Operation(group_norm_sums, _two_sums),
}
