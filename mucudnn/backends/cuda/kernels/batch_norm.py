"""Batch normalisation (Ioffe and Szegedy, 2015): each channel by its own statistics.

A block reads its part of a channel twice: for its first two moments, and to normalise.
The parts of a sum are added up by whoever needs it.
"""

from mucudnn.backends.cuda.kernels.program import KernelCall, Operation, Program, Specs
from mucudnn.backends.cuda.kernels.sums import CHANNELS, Channels

__all__ = ["OPERATIONS", "PROGRAM"]

PROGRAM = Program(
    CHANNELS
    + r"""
// Deviations are from a channel's first element, so that little cancels.
KERNEL channel_moments(const T* x, double* sums, double* squares, I N, I C, I S,
                       I width) {
    Channel channel(N, C, S, width);
    double origin = channel.c < C ? (double)x[channel.c * S] : 0, sum = 0, square = 0;
    EACH_OF(channel, i) {
        double deviation = (double)x[i] - origin;
        sum += deviation;
        square += deviation * deviation;
    }
    channel.leave(sums, lane_sum(sum, width));
    channel.leave(squares, lane_sum(square, width));
}

KERNEL batch_norm(const T* x, const P* gamma, const P* beta, P* running_mean,
                  P* running_var, T* y, P* mean, P* inv_std, const double* sums,
                  const double* squares, I N, I C, I S, I width, double eps,
                  double momentum, I update) {
    Channel channel(N, C, S, width);
    I c = channel.c;
    if (c >= C) return;
    double count = (double)N * S;
    double sum = total(sums, gridDim.y, C, c);
    double average = (double)x[c * S] + sum / count;
    double square = total(squares, gridDim.y, C, c) - sum * sum / count;
    if (square < 0) square = 0;
    P inverse = (P)(1 / sqrt(square / count + eps));  // as what runs again reads it
    A centre = (A)(P)average, factor = (A)((double)gamma[c] * (double)inverse);
    A shift = (A)beta[c];
    EACH_OF(channel, i) y[i] = (T)(((A)x[i] - centre) * factor + shift);
    if (!channel.first() || blockIdx.y != 0) return;
    mean[c] = (P)average;
    inv_std[c] = inverse;
    if (!update) return;
    double unbiased = square / (count > 1 ? count - 1 : 1);
    running_mean[c] =
        (P)((1 - momentum) * (double)running_mean[c] + momentum * average);
    running_var[c] = (P)((1 - momentum) * (double)running_var[c] + momentum * unbiased);
}

KERNEL batch_norm_eval(const T* x, const P* gamma, const P* beta, const P* mean,
                       const P* var, T* y, I N, I C, I S, I width, double eps) {
    Channel channel(N, C, S, width);
    I c = channel.c;
    if (c >= C) return;
    A factor = (A)((double)gamma[c] / sqrt((double)var[c] + eps));
    A centre = (A)mean[c], shift = (A)beta[c];
    EACH_OF(channel, i) y[i] = (T)(((A)x[i] - centre) * factor + shift);
}

KERNEL channel_dots(const T* x, const T* dy, const P* mean, double* sums, double* dots,
                    I N, I C, I S, I width) {
    Channel channel(N, C, S, width);
    A centre = channel.c < C ? (A)mean[channel.c] : (A)0;
    double sum = 0, dot = 0;
    EACH_OF(channel, i) {
        sum += (double)dy[i];
        dot += (double)((A)x[i] - centre) * (double)dy[i];
    }
    channel.leave(sums, lane_sum(sum, width));
    channel.leave(dots, lane_sum(dot, width));
}

KERNEL batch_norm_grad(const T* x, const T* dy, const P* gamma, const P* mean,
                       const P* inv_std, T* dx, P* dgamma, P* dbeta,
                       const double* sums, const double* dots, I N, I C, I S,
                       I width) {
    Channel channel(N, C, S, width);
    I c = channel.c;
    if (c >= C) return;
    double count = (double)N * S, inverse = (double)inv_std[c];
    double sum = total(sums, gridDim.y, C, c), dot = total(dots, gridDim.y, C, c);
    double factor = (double)gamma[c] * inverse;
    A centre = (A)mean[c], scale = (A)factor, offset = (A)(-factor * sum / count);
    A along = (A)(-factor * inverse * inverse * dot / count);
    EACH_OF(channel, i)
        dx[i] = (T)((A)dy[i] * scale + ((A)x[i] - centre) * along + offset);
    if (!channel.first() || blockIdx.y != 0) return;
    dgamma[c] = (P)(dot * inverse);
    dbeta[c] = (P)sum;
}
"""
)


def batch_norm(call: KernelCall) -> None:
    """Normalise by the statistics of the batch, and move the running ones."""
    x, gamma, *_ = call.inputs
    channels = Channels.of(x.shape)
    sums, squares = channels.buffers(call.workspace, 2)
    shape, blocks = channels.arguments, channels.blocks
    call.launch(PROGRAM, "channel_moments", blocks, x, sums, squares, *shape)
    operands = *call.inputs, *call.outputs, sums, squares
    numbers = *call.numbers("eps", "momentum"), int(call.attrs["update"])
    arguments = *operands, *shape, *numbers
    call.launch(PROGRAM, "batch_norm", blocks, *arguments, beside=gamma)


def batch_norm_eval(call: KernelCall) -> None:
    """Normalise by the running statistics."""
    x, gamma, *_ = call.inputs
    channels = Channels.of(x.shape)
    arguments = *call.inputs, *call.outputs, *channels.arguments, *call.numbers("eps")
    blocks = channels.blocks
    call.launch(PROGRAM, "batch_norm_eval", blocks, *arguments, beside=gamma)


def batch_norm_grad(call: KernelCall) -> None:
    """Dx = gamma inv_std (dy - mean(dy) - x̂ mean(dy x̂)), dgamma and dbeta."""
    x, dy, _, mean, _ = call.inputs
    channels = Channels.of(x.shape)
    sums, dots = channels.buffers(call.workspace, 2)
    shape, blocks = channels.arguments, channels.blocks
    arguments = x, dy, mean, sums, dots, *shape
    call.launch(PROGRAM, "channel_dots", blocks, *arguments, beside=mean)
    operands = *call.inputs, *call.outputs, sums, dots
    call.launch(PROGRAM, "batch_norm_grad", blocks, *operands, *shape, beside=mean)


def _two_sums(inputs: Specs, *_: object) -> int:
    return 2 * Channels.of(inputs[0].shape).nbytes


OPERATIONS: dict[str, Operation] = {
    "batch_norm": Operation(batch_norm, _two_sums),
    "batch_norm_eval": Operation(batch_norm_eval),
    "batch_norm_grad": Operation(batch_norm_grad, _two_sums),
}
