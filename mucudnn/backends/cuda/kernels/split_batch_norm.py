"""Batch normalisation of batch slices, split into per-slice and merging operations.

A slice's statistics are its count, its mean and its sum of squares about the mean, in
double precision. Sums over a slice are computed by the kernels for whole batches.
"""

from collections.abc import Sequence
from typing import Any

from mucudnn.backends.cuda.kernels.batch_norm import PROGRAM as WHOLE, apply_last
from mucudnn.backends.cuda.kernels.batch_norm_grad import partial_sums
from mucudnn.backends.cuda.kernels.channels import Channels
from mucudnn.backends.cuda.kernels.normed import NORMED
from mucudnn.backends.cuda.kernels.program import (
    KernelCall,
    Operation,
    Program,
    Specs,
    flat,
)
from mucudnn.backends.cuda.kernels.sums import CHANNELS

__all__ = ["OPERATIONS", "PROGRAM", "all_moments", "moments", "statistics"]

PROGRAM = Program(
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


def batch_norm_sums(call: KernelCall) -> None:
    """Compute (count, mean, sum of squares about it) of each channel, (3, C)."""
    moments(call, Channels.here(call, call.inputs[0]))


def moments(call: KernelCall, channels: Channels) -> None:
    """Write count, mean and sum of squares about it of the channels of a tensor."""
    (x,), (stats,) = call.inputs, call.outputs
    sums, squares = channels.buffers(call.workspace, 2)
    partial = x, sums, squares, *channels.arrived(call)
    blocks, name = channels.blocks, channels.kernel("channel_moments")
    call.launch(WHOLE, name, blocks, *partial, *channels.arguments)
    finished = x, sums, squares, stats, channels.left, *channels.shape
    call.launch(PROGRAM, "finish_moments", flat(channels.shape[1]), *finished)


def batch_norm_merge(call: KernelCall) -> None:
    """Compute the batch's mean and inv_std; update the running statistics."""
    *slices, mean, var = call.inputs
    numbers = float(call.attrs["momentum"]), bool(call.attrs["update"])
    all_moments(call, slices, (mean, var), *numbers)


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
        call.launch(PROGRAM, "join_moments", blocks, *arguments, like=running[0])
    operands = call.workspace, *running, *call.outputs, C
    numbers = *call.numbers("eps"), momentum, int(update)
    arguments = *operands, *numbers
    call.launch(PROGRAM, "batch_norm_merge", blocks, *arguments, like=running[0])


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
    call.launch(PROGRAM, "batch_norm_apply", blocks, *arguments, beside=gamma)


def batch_norm_grad_sums(call: KernelCall) -> None:
    """Compute a slice's share of dgamma and of dbeta."""
    x, dy, mean, inv_std = call.inputs
    channels = Channels.here(call, x, dy)
    parts = channels.buffers(call.workspace, 2)
    operands = x, dy, None, None, None, mean, inv_std, None
    partial_sums(call, channels, operands, parts)
    C = channels.shape[1]
    finished = inv_std, *call.outputs, *parts, channels.left, C
    call.launch(PROGRAM, "batch_norm_grad_sums", flat(C), *finished)


def batch_norm_grad_apply(call: KernelCall) -> None:
    """Compute a slice's gamma inv_std (dy - (dbeta + x̂ dgamma) / count)."""
    x, dy, gamma, *_ = call.inputs
    channels = Channels.here(call, x, dy, *call.outputs)
    operands = *call.inputs, *call.outputs, *channels.arguments
    arguments = *operands, float(call.attrs["count"])
    blocks, name = channels.blocks, channels.kernel("batch_norm_grad_apply")
    call.launch(PROGRAM, name, blocks, *arguments, beside=gamma)


def _two_sums(inputs: Specs, *_: object) -> int:
    return 2 * Channels.most_bytes(inputs[0])


def statistics(inputs: Specs, *_: object) -> int:
    """Return the bytes of the workspace in which moments are merged."""
    return inputs[0].nbytes


OPERATIONS: dict[str, Operation] = {
    "batch_norm_apply": Operation(batch_norm_apply),
    "batch_norm_grad_apply": Operation(batch_norm_grad_apply),
    "batch_norm_grad_sums": Operation(batch_norm_grad_sums, _two_sums),
    "batch_norm_merge": Operation(batch_norm_merge, statistics),
    "batch_norm_sums": Operation(batch_norm_sums, _two_sums),
}
