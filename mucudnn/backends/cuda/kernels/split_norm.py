"""Batch and group normalisation of slices of a batch, and fused with ReLU.

A slice's statistics are its count, its mean and its sum of squares about the mean, in
double precision. Sums over a slice are computed by the kernels for whole batches.
"""

import math
from collections.abc import Sequence
from typing import Any

from mucudnn.backends.cuda.kernels.batch_norm import (
    NORMED,
    PROGRAM as WHOLE,
    apply_last,
    backward,
    forward,
    partial_sums,
    workspace,
)
from mucudnn.backends.cuda.kernels.group_norm import (
    ROWS,
    affine_grads,
    affine_workspace,
    rows,
)
from mucudnn.backends.cuda.kernels.launch import (
    Attrs,
    KernelCall,
    Operation,
    Specs,
    flat,
)
from mucudnn.backends.cuda.kernels.reductions import CHANNELS, REDUCE, Channels
from mucudnn.backends.cuda.kernels.source import THREADS, Program


def batch_norm_sums(call: KernelCall) -> None:
    """Compute (count, mean, sum of squares about it) of each channel, (3, C)."""
    moments(call, Channels.here(call, call.inputs[0]))


def batch_norm_merge(call: KernelCall) -> None:
    """Compute the batch's mean and inv_std; update the running statistics."""
    *slices, mean, var = call.inputs
    numbers = float(call.attrs["momentum"]), bool(call.attrs["update"])
    all_moments(call, slices, (mean, var), *numbers)


def batch_norm_apply(call: KernelCall) -> None:
    """Normalise a slice by the statistics of its batch."""
    x, gamma, *_ = call.inputs
    channels = Channels.here(call, x, *call.outputs)
    if channels.apiece > 1:
        operands = *call.inputs, None, *call.outputs
        apply_last(call, channels, operands, relu=False)
        return
    arguments = *call.inputs, *call.outputs, *channels.arguments
    blocks = channels.blocks
    call.launch(
        SPLIT_BATCH_NORM_PROGRAM, "batch_norm_apply", blocks, *arguments, beside=gamma
    )


def batch_norm_grad_sums(call: KernelCall) -> None:
    """Compute a slice's share of dgamma and of dbeta."""
    x, dy, mean, inv_std = call.inputs
    channels = Channels.here(call, x, dy)
    parts = channels.buffers(call.workspace, 2)
    operands = x, dy, None, None, None, mean, inv_std, None
    partial_sums(call, channels, operands, parts)
    C = channels.shape[1]
    finished = inv_std, *call.outputs, *parts, channels.left, C
    call.launch(SPLIT_BATCH_NORM_PROGRAM, "batch_norm_grad_sums", flat(C), *finished)


def batch_norm_grad_apply(call: KernelCall) -> None:
    """Compute a slice's gamma inv_std (dy - (dbeta + x̂ dgamma) / count)."""
    x, dy, gamma, *_ = call.inputs
    channels = Channels.here(call, x, dy, *call.outputs)
    operands = *call.inputs, *call.outputs, *channels.arguments
    arguments = *operands, float(call.attrs["count"])
    blocks, name = channels.blocks, channels.kernel("batch_norm_grad_apply")
    call.launch(SPLIT_BATCH_NORM_PROGRAM, name, blocks, *arguments, beside=gamma)


def _two_sums(inputs: Specs, *_: object) -> int:
    return 2 * Channels.most_bytes(inputs[0])


def statistics(inputs: Specs, *_: object) -> int:
    """Return the bytes of the workspace in which moments are merged."""
    return inputs[0].nbytes


# Group and layer normalisation of image strips, by blocks that share a group.
#
# The moments of a strip's groups come from the kernels of batch normalisation, which
# see the groups of all samples as the channels of one sample.


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


def _group_two_sums(inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    return 2 * _as_channels(inputs, outputs).nbytes


def batch_norm_relu(call: KernelCall) -> None:
    """Compute max(normalised [+ term], 0); update the running statistics."""
    forward(call, relu=True)


def batch_norm_relu_grad(call: KernelCall) -> None:
    """Run `batch_norm_grad` on dy masked to positive inputs of the ReLU."""
    x, dy, gamma, beta, mean, inv_std = call.inputs
    backward(call, (x, dy, None, gamma, beta, mean, inv_std, None), call.outputs)


def batch_norm_add_relu_grad(call: KernelCall) -> None:
    """Compute the term's gradient, dy where y is not 0, and the others."""
    x, dy, y, gamma, mean, inv_std = call.inputs
    dterm, *others = call.outputs
    backward(call, (x, dy, y, gamma, None, mean, inv_std, dterm), others)


SPLIT_BATCH_NORM_PROGRAM = Program(
    CHANNELS
    + NORMED
    + r"""
KERNEL finish_moments(const T* x, const double* sums, const double* squares,
                      double* stats, I parts, I N, I C, I S) {
    EACH(c, C) {
        double count = (double)N * S, sum = total(sums, parts, C, c);
        double rest = total(squares, parts, C, c) - sum * sum / count;
        stats[c] = count;
        stats[C + c] = (double)(A)x[c * S] + sum / count;
        stats[2 * C + c] = rest > 0 ? rest : 0;
    }
}

KERNEL join_moments(const double* stats, double* all, const T* type, I C, I first) {
    EACH(c, C) {
        if (first) {
            for (I row = 0; row < 3; ++row) all[row * C + c] = stats[row * C + c];
            continue;
        }
        double one = all[c], other = stats[c], count = one + other;
        double apart = stats[C + c] - all[C + c];
        all[c] = count;
        all[C + c] += apart * (other / count);
        all[2 * C + c] += stats[2 * C + c] + apart * apart * (one * other / count);
    }
}

KERNEL batch_norm_merge(const double* all, T* running_mean, T* running_var, T* mean,
                        T* inv_std, I C, double eps, double momentum, I update) {
    EACH(c, C) {
        double count = all[c], average = all[C + c], square = all[2 * C + c];
        mean[c] = (T)(A)average;
        inv_std[c] = (T)(A)(1 / sqrt(square / count + eps));
        if (!update) continue;
        double unbiased = square / (count > 1 ? count - 1 : 1), rest = 1 - momentum;
        running_mean[c] =
            (T)(A)(rest * (double)(A)running_mean[c] + momentum * average);
        running_var[c] = (T)(A)(rest * (double)(A)running_var[c] + momentum * unbiased);
    }
}

KERNEL batch_norm_apply(const T* x, const P* gamma, const P* beta, const P* mean,
                        const P* inv_std, T* y, I N, I C, I S, I width) {
    Channel channel(N, C, S, width);
    I c = channel.c;
    if (c >= C) return;
    Normed normed(mean[c], inv_std[c], gamma[c], beta[c]);
    constexpr int CH = 1;
    EACH_PACK(channel, aligned(x) && aligned(y), (x), {
        Pack<T, W> v = found.of[0];
        for (int j = 0; j < W; ++j) v.at[j] = (T)normed(v.at[j]);
        store(y + at.i, v);
    })
}

KERNEL batch_norm_grad_sums(const T* inv_std, T* dgamma, T* dbeta, const double* sums,
                            const double* dots, I parts, I C) {
    EACH(c, C) {
        dgamma[c] = (T)(A)(total(dots, parts, C, c) * (double)inv_std[c]);
        dbeta[c] = (T)(A)total(sums, parts, C, c);
    }
}

#define GRADIENT                                                                  \
    const T *x, const T *dy, const P *gamma, const P *mean, const P *inv_std,         \
        const P *dgamma, const P *dbeta, T *dx, I N, I C, I S, I width, double count
template <int CH> __device__ void gradient_of(GRADIENT) {
    ChannelsOf<CH> channel(N, C, S, width);
    I c = channel.own();
    InputGrad grad[CH];
    for (int j = 0; j < CH; ++j) {
        double dot = (double)dgamma[c + j] / (double)inv_std[c + j];
        grad[j] = InputGrad(mean[c + j], inv_std[c + j], gamma[c + j],
                            (double)dbeta[c + j], dot, count);
    }
    EACH_PACK(channel, aligned(x) && aligned(dy) && aligned(dx), (x, dy), {
        Pack<T, W> v = found.of[0], d = found.of[1];
        for (int j = 0; j < W; ++j) v.at[j] = (T)grad[OF(j)](v.at[j], (A)d.at[j]);
        store(dx + at.i, v);
    })
}

KERNEL batch_norm_grad_apply(GRADIENT) {
    gradient_of<1>(x, dy, gamma, mean, inv_std, dgamma, dbeta, dx, N, C, S, width,
                   count);
}

KERNEL batch_norm_grad_apply_last(GRADIENT) {
    gradient_of<PACKED>(x, dy, gamma, mean, inv_std, dgamma, dbeta, dx, N, C, S, width,
                        count);
}
"""
)


def moments(call: KernelCall, channels: Channels) -> None:
    """Write count, mean and sum of squares about it of the channels of a tensor."""
    (x,), (stats,) = call.inputs, call.outputs
    sums, squares = channels.buffers(call.workspace, 2)
    partial = x, sums, squares, *channels.arrived(call)
    blocks, name = channels.blocks, channels.kernel("channel_moments")
    call.launch(WHOLE, name, blocks, *partial, *channels.arguments)
    finished = x, sums, squares, stats, channels.left, *channels.shape
    call.launch(
        SPLIT_BATCH_NORM_PROGRAM, "finish_moments", flat(channels.shape[1]), *finished
    )


def all_moments(
    call: KernelCall,
    slices: Sequence[Any],
    running: Sequence[Any],
    momentum: float,
    update: bool,
) -> None:
    """Merge the moments of slices; write mean, inv_std and running statistics."""
    C = running[0].size
    blocks = flat(C)
    for number, stats in enumerate(slices):
        first = int(number == 0)
        arguments = stats, call.workspace, running[0], C, first
        call.launch(
            SPLIT_BATCH_NORM_PROGRAM,
            "join_moments",
            blocks,
            *arguments,
            like=running[0],
        )
    operands = call.workspace, *running, *call.outputs, C
    numbers = *call.numbers("eps"), momentum, int(update)
    arguments = *operands, *numbers
    call.launch(
        SPLIT_BATCH_NORM_PROGRAM,
        "batch_norm_merge",
        blocks,
        *arguments,
        like=running[0],
    )


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


def _parts(call: KernelCall) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Return the grid (groups of all samples, blocks per group) and the sizes."""
    count, groups, length, inner = rows(call.inputs[0].shape, call.attrs)
    parts = min(_MOST_PARTS, max(1, length // (THREADS * _FEWEST)))
    return (count, parts), (groups, length, inner)


def _as_channels(inputs: Specs, outputs: Specs) -> Channels:
    """View the groups of all samples as the channels of one sample."""
    count = math.prod(outputs[0].shape[1:])
    return Channels.of((1, count, math.prod(inputs[0].shape) // count))


OPERATIONS: dict[str, Operation] = {
    "batch_norm_apply": Operation(batch_norm_apply),
    "batch_norm_grad_apply": Operation(batch_norm_grad_apply),
    "batch_norm_grad_sums": Operation(batch_norm_grad_sums, _two_sums),
    "batch_norm_merge": Operation(batch_norm_merge, statistics),
    "batch_norm_sums": Operation(batch_norm_sums, _two_sums),
    "group_norm_apply": Operation(group_norm_apply),
    "group_norm_grad_apply": Operation(group_norm_grad_apply),
    "group_norm_grad_sums": Operation(group_norm_grad_sums, affine_workspace),
    "group_norm_merge": Operation(group_norm_merge, statistics),
    "group_norm_sums": Operation(group_norm_sums, _group_two_sums),
    "batch_norm_add_relu": Operation(batch_norm_relu, workspace),
    "batch_norm_add_relu_grad": Operation(batch_norm_add_relu_grad, workspace),
    "batch_norm_relu": Operation(batch_norm_relu, workspace),
    "batch_norm_relu_grad": Operation(batch_norm_relu_grad, workspace),
}
