"""The gradients of batch normalisation, of a ReLU behind it, and of a sum between them.

Gradients are masked where they are read. Without a sum the mask is told from the input
by the formula of the forward pass, rounding by rounding, from what that pass saved: its
result is not read. Where a channel fits into a block's shared memory, one launch does
all; it keeps the masked gradient in registers.
"""

from collections.abc import Sequence
from typing import Any

from mucudnn.backends.cuda.kernels.normed import NORMED, fits, workspace
from mucudnn.backends.cuda.kernels.program import KernelCall, Operation, Program
from mucudnn.backends.cuda.kernels.sums import CHANNELS, LAST_BLOCK, Channels

__all__ = ["OPERATIONS", "PROGRAM", "backward", "partial_sums"]

PROGRAM = Program(
    CHANNELS
    + LAST_BLOCK
    + NORMED
    + r"""
// Of the gradient what a ReLU lets through: all without one; where its result, if it is
// given, is not 0, which is kept as the term's gradient; where the formula says so.
template <int CH> struct Gradient {
    const T *dy, *y;
    T* dterm;
    bool formula;
    NormedOf<CH> normed;
    __device__ Gradient(I c, const T* dy, const T* y, T* dterm, const P* gamma,
                        const P* beta, const P* mean, const P* inv_std)
        : dy(dy), y(y), dterm(dterm), formula(beta),
          normed(c, gamma, beta, mean, inv_std) {}
    __device__ bool packed() const {
        return aligned(dy) && aligned(y) && aligned(dterm);
    }
    template <int W>
    __device__ Pack<T, W> operator()(I i, const Pack<T, W>& x, Tally<CH>& sums,
                                     Tally<CH>& dots) const {
        Pack<T, W> d = load<W>(dy + i), result;
        if (y) result = load<W>(y + i);
        for (int j = 0; j < W; ++j) {
            const Normed& own = normed.of[OF(j)];
            if (y && (A)result.at[j] == 0) d.at[j] = (T)(A)0;
            A passed = formula ? own.masked(x.at[j], d.at[j]) : (A)d.at[j];
            d.at[j] = (T)passed;
            sums.add(j, passed);
            dots.add(j, ((A)x.at[j] - own.centre) * passed);
        }
        if (dterm) store(dterm + i, d);
        sums.added();
        dots.added();
        return d;
    }
};

#define BACKWARD                                                                  \
    const T *x, const T *dy, const T *y, const P *gamma, const P *beta,           \
        const P *mean, const P *inv_std, T *dterm

#define SHAPE I N, I C, I S, I width
template <int CH> __device__ void dots_of(BACKWARD, double* sums, double* dots, SHAPE) {
    ChannelsOf<CH> channel(N, C, S, width);
    Gradient<CH> gradient(channel.own(), dy, y, dterm, gamma, beta, mean, inv_std);
    Tally<CH> ones, products;
    EACH_PACK(channel, aligned(x) && gradient.packed(), {
        gradient(at.i, load<W>(x + at.i), ones, products);
    })
    leave_sums(channel, ones, sums, width);
    leave_sums(channel, products, dots, width);
}

KERNEL channel_dots(BACKWARD, double* sums, double* dots, SHAPE) {
    dots_of<1>(x, dy, y, gamma, beta, mean, inv_std, dterm, sums, dots, N, C, S, width);
}

KERNEL channel_dots_last(BACKWARD, double* sums, double* dots, long long* arrived,
                         SHAPE) {
    dots_of<PACKED>(x, dy, y, gamma, beta, mean, inv_std, dterm, sums, dots, N, C, S,
                    width);
    if (!is_last(arrived)) return;
    Gathering<PACKED> all(C, width);
    all.merge(sums);
    all.merge(dots);
}

#define RESULTS                                                                   \
    T *dx, P *dgamma, P *dbeta, const double *sums, const double *dots, I parts, I N, \
        I C, I S, I width
template <int CH> __device__ void input_grad(BACKWARD, RESULTS) {
    ChannelsOf<CH> channel(N, C, S, width);
    I c = channel.c;
    if (c >= C) return;
    InputGrad grad[CH];
    for (int j = 0; j < CH; ++j) {
        double sum = total(sums, parts, C, c + j), dot = total(dots, parts, C, c + j);
        grad[j] = InputGrad(mean[c + j], inv_std[c + j], gamma[c + j], sum, dot,
                            (double)N * S);
        if (!channel.first() || blockIdx.y != 0) continue;
        dgamma[c + j] = (P)(dot * (double)inv_std[c + j]);
        dbeta[c + j] = (P)sum;
    }
    Gradient<CH> gradient(c, dy, y, dterm, gamma, beta, mean, inv_std);
    Tally<CH> unused;
    EACH_PACK(channel, aligned(x) && aligned(dx) && gradient.packed(), {
        Pack<T, W> v = load<W>(x + at.i), d = gradient(at.i, v, unused, unused);
        for (int j = 0; j < W; ++j) v.at[j] = (T)grad[OF(j)](v.at[j], (A)d.at[j]);
        store(dx + at.i, v);
    })
}

KERNEL batch_norm_grad(BACKWARD, RESULTS) {
    input_grad<1>(x, dy, y, gamma, beta, mean, inv_std, dterm, dx, dgamma, dbeta, sums,
                  dots, parts, N, C, S, width);
}

KERNEL batch_norm_grad_last(BACKWARD, RESULTS) {
    input_grad<PACKED>(x, dy, y, gamma, beta, mean, inv_std, dterm, dx, dgamma, dbeta,
                       sums, dots, parts, N, C, S, width);
}

template <int W>
__device__ void whole_grad(const Channel& channel, const Gradient<1>& gradient, T* room,
                           const T* x, P gamma, P mean, P inv_std, T* dx, P* dgamma,
                           P* dbeta, double count) {
    Pack<T, W> kept[HELD / W];
    Tally<1> ones, products;
    channel.template few<W, HELD / W>([&](const Element& at, int turn) {
        Pack<T, W> v = load<W>(x + at.i);
        store(room + at.k, v);
        kept[turn] = gradient(at.i, v, ones, products);
    });
    double sum = lane_sum(ones.far[0], 1), dot = lane_sum(products.far[0], 1);
    InputGrad grad(mean, inv_std, gamma, sum, dot, count);
    channel.template few<W, HELD / W>([&](const Element& at, int turn) {
        Pack<T, W> v = load<W>(room + at.k);
        for (int j = 0; j < W; ++j) v.at[j] = (T)grad(v.at[j], (A)kept[turn].at[j]);
        store(dx + at.i, v);
    });
    if (!channel.first()) return;
    dgamma[channel.c] = (P)(dot * (double)inv_std);
    dbeta[channel.c] = (P)sum;
}

KERNEL batch_norm_grad_whole(BACKWARD, T* dx, P* dgamma, P* dbeta, I N, I C, I S) {
    alignas(16) __shared__ T room[ROOM];
    Channel channel(N, C, S, 1);
    I c = channel.c;
    Gradient<1> gradient(c, dy, y, dterm, gamma, beta, mean, inv_std);
    if (channel.packs && aligned(x) && aligned(dx) && gradient.packed())
        whole_grad<PACKED>(channel, gradient, room, x, gamma[c], mean[c], inv_std[c],
                           dx, dgamma, dbeta, (double)N * S);
    else
        whole_grad<1>(channel, gradient, room, x, gamma[c], mean[c], inv_std[c], dx,
                      dgamma, dbeta, (double)N * S);
}
"""
)


def batch_norm_grad(call: KernelCall) -> None:
    """Dx = gamma inv_std (dy - mean(dy) - x̂ mean(dy x̂)), dgamma and dbeta."""
    x, dy, gamma, mean, inv_std = call.inputs
    backward(call, (x, dy, None, gamma, None, mean, inv_std, None), call.outputs)


def backward(
    call: KernelCall, operands: tuple[Any, ...], results: Sequence[Any]
) -> None:
    """Those of what a ReLU lets through.

    Args:
        call: Which backward pass.
        operands: X, dy, the ReLU's result, gamma, beta, mean, 1 / standard deviation
            and the term's gradient. With a result the mask is told from it, with beta
            from x; None is what there is not.
        results: Dx, dgamma and dbeta.
    """
    x, dy, y, gamma, _, mean, inv_std, dterm = operands
    channels = Channels.here(call, x, dy, y, dterm, results[0])
    if fits(channels, x.dtype.itemsize):
        arguments = *operands, *results, *channels.shape
        blocks, name = (channels.shape[1], 1), "batch_norm_grad_whole"
        call.launch(PROGRAM, name, blocks, *arguments, beside=mean)
        return
    parts = channels.buffers(call.workspace, 2)
    partial_sums(call, channels, operands, parts)
    if y is not None:  # what it let through is kept
        operands = x, dterm, None, gamma, None, mean, inv_std, None
    arguments = *operands, *results, *parts, channels.left, *channels.arguments
    blocks, name = channels.blocks, channels.kernel("batch_norm_grad")
    call.launch(PROGRAM, name, blocks, *arguments, beside=mean)


def partial_sums(
    call: KernelCall, channels: Channels, operands: Sequence[Any], parts: Sequence[Any]
) -> None:
    """The sums of gradients, and of gradients times deviations: `channels.left`."""
    sums = *parts, *channels.arrived(call)
    arguments = *operands, *sums, *channels.arguments
    blocks, name = channels.blocks, channels.kernel("channel_dots")
    call.launch(PROGRAM, name, blocks, *arguments, beside=operands[5])


OPERATIONS: dict[str, Operation] = {
    "batch_norm_grad": Operation(batch_norm_grad, workspace),
}
