"""Batch normalisation with a sum and a ReLU behind it: two launches, as without them.

Gradients are masked where they are read. Without a sum the mask is told from the input
by the formula of the forward pass, rounding by rounding (a product and a sum in one),
from what that pass saved: neither its result nor a masked gradient is read or written.
"""

from mucudnn.backends.cuda.kernels.batch_norm import PROGRAM as WHOLE
from mucudnn.backends.cuda.kernels.program import KernelCall, Operation, Program, Specs
from mucudnn.backends.cuda.kernels.sums import CHANNELS, Channels

__all__ = ["OPERATIONS", "PROGRAM"]

PROGRAM = Program(
    CHANNELS
    + r"""
__device__ A positive(A v) { return v > 0 || v != v ? v : (A)0; }

// Normalised elements of a channel, from numbers as they are saved.
struct Normed {
    A centre, factor, shift;
    __device__ Normed(P mean, P inverse, P gamma, P beta)
        : centre((A)mean), factor((A)((double)gamma * (double)inverse)),
          shift((A)beta) {}
    __device__ A operator()(T x) const {
        return fma((A)x - centre, factor, shift);
    }
    __device__ A masked(T x, T dy) const {
        A y = (A)(T)(*this)(x);
        return y > 0 || y != y ? (A)dy : (A)0;
    }
};

// A channel's statistics from the sums of its parts.
struct Moments {
    double average, square, count;
    __device__ Moments(const T* x, const double* sums, const double* squares,
                       const Channel& channel, I N) {
        I c = channel.c;
        count = (double)N * channel.S;
        double sum = total(sums, gridDim.y, channel.C, c);
        average = (double)x[c * channel.S] + sum / count;
        square = total(squares, gridDim.y, channel.C, c) - sum * sum / count;
        if (square < 0) square = 0;
    }
    __device__ P inverse(double eps) const {
        return (P)(1 / sqrt(square / count + eps));
    }
    __device__ void move(P* running_mean, P* running_var, double momentum) const {
        double unbiased = square / (count > 1 ? count - 1 : 1), rest = 1 - momentum;
        *running_mean = (P)(rest * (double)*running_mean + momentum * average);
        *running_var = (P)(rest * (double)*running_var + momentum * unbiased);
    }
};

#define FORWARD(formula)                                                          \
    Channel channel(N, C, S, width);                                              \
    I c = channel.c;                                                              \
    if (c >= C) return;                                                           \
    Moments moments(x, sums, squares, channel, N);                                \
    P centre = (P)moments.average, inverse = moments.inverse(eps);                \
    Normed normed(centre, inverse, gamma[c], beta[c]);                            \
    EACH_OF(channel, i) y[i] = (T)positive(formula);                              \
    if (!channel.first() || blockIdx.y != 0) return;                              \
    mean[c] = centre;                                                             \
    inv_std[c] = inverse;                                                         \
    if (update) moments.move(running_mean + c, running_var + c, momentum);

KERNEL batch_norm_relu(const T* x, const P* gamma, const P* beta, P* running_mean,
                       P* running_var, T* y, P* mean, P* inv_std, const double* sums,
                       const double* squares, I N, I C, I S, I width, double eps,
                       double momentum, I update) {
    FORWARD(normed(x[i]))
}

KERNEL batch_norm_add_relu(const T* x, const P* gamma, const P* beta, P* running_mean,
                           P* running_var, const T* term, T* y, P* mean, P* inv_std,
                           const double* sums, const double* squares, I N, I C, I S,
                           I width, double eps, double momentum, I update) {
    FORWARD(normed(x[i]) + (A)term[i])
}

KERNEL masked_dots(const T* x, const T* dy, const P* gamma, const P* beta,
                   const P* mean, const P* inv_std, double* sums, double* dots, I N,
                   I C, I S, I width) {
    Channel channel(N, C, S, width);
    I c = channel.c < C ? channel.c : 0;
    Normed normed(mean[c], inv_std[c], gamma[c], beta[c]);
    double sum = 0, dot = 0;
    EACH_OF(channel, i) {
        double d = (double)normed.masked(x[i], dy[i]);
        sum += d;
        dot += (double)((A)x[i] - normed.centre) * d;
    }
    channel.leave(sums, lane_sum(sum, width));
    channel.leave(dots, lane_sum(dot, width));
}

// What is let through is kept: it is the term's gradient.
KERNEL kept_dots(const T* x, const T* dy, const T* y, const P* mean, T* dterm,
                 double* sums, double* dots, I N, I C, I S, I width) {
    Channel channel(N, C, S, width);
    A centre = channel.c < C ? (A)mean[channel.c] : (A)0;
    double sum = 0, dot = 0;
    EACH_OF(channel, i) {
        A d = (A)y[i] != 0 ? (A)dy[i] : (A)0;
        dterm[i] = (T)d;
        sum += (double)d;
        dot += (double)((A)x[i] - centre) * (double)d;
    }
    channel.leave(sums, lane_sum(sum, width));
    channel.leave(dots, lane_sum(dot, width));
}

KERNEL batch_norm_relu_grad(const T* x, const T* dy, const P* gamma, const P* beta,
                            const P* mean, const P* inv_std, T* dx, P* dgamma,
                            P* dbeta, const double* sums, const double* dots, I N,
                            I C, I S, I width) {
    Channel channel(N, C, S, width);
    I c = channel.c;
    if (c >= C) return;
    Normed normed(mean[c], inv_std[c], gamma[c], beta[c]);
    double count = (double)N * S, inverse = (double)inv_std[c];
    double sum = total(sums, gridDim.y, C, c), dot = total(dots, gridDim.y, C, c);
    double factor = (double)gamma[c] * inverse;
    A scale = (A)factor, offset = (A)(-factor * sum / count);
    A along = (A)(-factor * inverse * inverse * dot / count);
    EACH_OF(channel, i)
        dx[i] = (T)(normed.masked(x[i], dy[i]) * scale
                    + ((A)x[i] - normed.centre) * along + offset);
    if (!channel.first() || blockIdx.y != 0) return;
    dgamma[c] = (P)(dot * inverse);
    dbeta[c] = (P)sum;
}
"""
)


def batch_norm_relu(call: KernelCall) -> None:
    """max(normalised, 0); moves the running statistics."""
    _forward(call, "batch_norm_relu")


def batch_norm_add_relu(call: KernelCall) -> None:
    """max(normalised + term, 0); moves the running statistics."""
    _forward(call, "batch_norm_add_relu")


def batch_norm_relu_grad(call: KernelCall) -> None:
    """As `batch_norm_grad` of the gradient where the ReLU's input is not negative."""
    x, _, gamma, *_ = call.inputs
    channels = Channels.of(x.shape)
    sums, dots = channels.buffers(call.workspace, 2)
    shape, blocks, beside = channels.arguments, channels.blocks, gamma
    arguments = *call.inputs, sums, dots, *shape
    call.launch(PROGRAM, "masked_dots", blocks, *arguments, beside=beside)
    operands = *call.inputs, *call.outputs, sums, dots
    arguments = *operands, *shape
    call.launch(PROGRAM, "batch_norm_relu_grad", blocks, *arguments, beside=beside)


def batch_norm_add_relu_grad(call: KernelCall) -> None:
    """The gradient where the result is not 0, which is the term's, and the others."""
    x, dy, y, gamma, mean, inv_std = call.inputs
    dterm, *others = call.outputs
    channels = Channels.of(x.shape)
    sums, dots = channels.buffers(call.workspace, 2)
    shape, blocks = channels.arguments, channels.blocks
    arguments = x, dy, y, mean, dterm, sums, dots, *shape
    call.launch(PROGRAM, "kept_dots", blocks, *arguments, beside=mean)
    operands = x, dterm, gamma, mean, inv_std, *others, sums, dots
    call.launch(WHOLE, "batch_norm_grad", blocks, *operands, *shape, beside=mean)


def _forward(call: KernelCall, kernel: str) -> None:
    x, gamma, *_ = call.inputs
    channels = Channels.of(x.shape)
    sums, squares = channels.buffers(call.workspace, 2)
    shape, blocks = channels.arguments, channels.blocks
    call.launch(WHOLE, "channel_moments", blocks, x, sums, squares, *shape)
    operands = *call.inputs, *call.outputs, sums, squares
    numbers = *call.numbers("eps", "momentum"), int(call.attrs["update"])
    call.launch(PROGRAM, kernel, blocks, *operands, *shape, *numbers, beside=gamma)


def _two_sums(inputs: Specs, *_: object) -> int:
    return 2 * Channels.of(inputs[0].shape).nbytes


OPERATIONS: dict[str, Operation] = {
    "batch_norm_add_relu": Operation(batch_norm_add_relu, _two_sums),
    "batch_norm_add_relu_grad": Operation(batch_norm_add_relu_grad, _two_sums),
    "batch_norm_relu": Operation(batch_norm_relu, _two_sums),
    "batch_norm_relu_grad": Operation(batch_norm_relu_grad, _two_sums),
}
