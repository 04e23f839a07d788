"""Batch normalisation (Ioffe and Szegedy, 2015): each channel by its own statistics.

A sum, a ReLU or both may follow, in the same launches. A block reads its part of a
channel twice: for its first two moments, and to normalise; the parts of a sum are added
up by whoever needs it. Where a channel fits into a block's shared memory, one launch
does both and reads it once.
"""

from mucudnn.backends.cuda.kernels.normed import NORMED, fits, workspace
from mucudnn.backends.cuda.kernels.program import KernelCall, Operation, Program
from mucudnn.backends.cuda.kernels.sums import CHANNELS, Channels

__all__ = ["OPERATIONS", "PROGRAM", "forward"]

PROGRAM = Program(
    CHANNELS
    + NORMED
    + r"""
// Deviations are from a channel's first element, so that little cancels.
template <bool KEEP>
__device__ Sums moments_of(const Channel& channel, const T* x, A origin, T* room) {
    Sums sums = {0, 0};
    EACH_PACK(channel, aligned(x), {
        Pack<T, W> v = load<W>(x + at.i);
        if (KEEP) store(room + at.k, v);
        A sum = 0, square = 0;
        for (int j = 0; j < W; ++j) {
            A deviation = (A)v.at[j] - origin;
            sum += deviation;
            square += deviation * deviation;
        }
        sums.one += (double)sum;
        sums.other += (double)square;
    })
    return sums;
}

#define FORWARD                                                                   \
    const T *x, const P *gamma, const P *beta, P *running_mean, P *running_var,   \
        const T *term, T *y, P *mean, P *inv_std
#define RULES double eps, double momentum, I update, I relu

template <bool KEPT>
__device__ void normalise(const Channel& channel, const Moments& moments,
                          const T* room, FORWARD, RULES) {
    I c = channel.c;
    if (c >= channel.C) return;
    P centre = (P)moments.average, inverse = moments.inverse(eps);
    Normed normed(centre, inverse, gamma[c], beta[c]);
    EACH_PACK(channel, aligned(x) && aligned(y) && aligned(term), {
        Pack<T, W> v = KEPT ? load<W>(room + at.k) : load<W>(x + at.i), more;
        if (term) more = load<W>(term + at.i);
        for (int j = 0; j < W; ++j) {
            A value = normed(v.at[j]);
            if (term) value += (A)more.at[j];
            v.at[j] = (T)(relu ? positive(value) : value);
        }
        store(y + at.i, v);
    })
    if (!channel.first() || blockIdx.y != 0) return;
    mean[c] = centre;
    inv_std[c] = inverse;
    if (update) moments.move(running_mean + c, running_var + c, momentum);
}

KERNEL channel_moments(const T* x, double* sums, double* squares, I N, I C, I S,
                       I width) {
    Channel channel(N, C, S, width);
    A origin = channel.c < C ? (A)x[channel.c * S] : (A)0;
    Sums found = moments_of<false>(channel, x, origin, 0);
    channel.leave(sums, lane_sum(found.one, width));
    channel.leave(squares, lane_sum(found.other, width));
}

KERNEL batch_norm(FORWARD, const double* sums, const double* squares, I N, I C, I S,
                  I width, RULES) {
    Channel channel(N, C, S, width);
    I c = channel.c < C ? channel.c : 0;
    Moments moments((A)x[c * S], total(sums, gridDim.y, C, c),
                    total(squares, gridDim.y, C, c), (double)N * S);
    normalise<false>(channel, moments, 0, x, gamma, beta, running_mean, running_var,
                     term, y, mean, inv_std, eps, momentum, update, relu);
}

KERNEL batch_norm_whole(FORWARD, I N, I C, I S, RULES) {
    alignas(16) __shared__ T room[ROOM];
    Channel channel(N, C, S, 1);
    A origin = (A)x[channel.c * S];
    Sums found = moments_of<true>(channel, x, origin, room);
    Moments moments(origin, lane_sum(found.one, 1), lane_sum(found.other, 1),
                    (double)N * S);
    normalise<true>(channel, moments, room, x, gamma, beta, running_mean, running_var,
                    term, y, mean, inv_std, eps, momentum, update, relu);
}

KERNEL batch_norm_eval(const T* x, const P* gamma, const P* beta, const P* mean,
                       const P* var, T* y, I N, I C, I S, I width, double eps) {
    Channel channel(N, C, S, width);
    I c = channel.c;
    if (c >= C) return;
    A factor = (A)((double)gamma[c] / sqrt((double)var[c] + eps));
    A centre = (A)mean[c], shift = (A)beta[c];
    EACH_PACK(channel, aligned(x) && aligned(y), {
        Pack<T, W> v = load<W>(x + at.i);
        for (int j = 0; j < W; ++j)
            v.at[j] = (T)(((A)v.at[j] - centre) * factor + shift);
        store(y + at.i, v);
    })
}

"""
)


def batch_norm(call: KernelCall) -> None:
    """Normalise by the statistics of the batch, and move the running ones."""
    forward(call, relu=False)


def forward(call: KernelCall, *, relu: bool) -> None:
    """The same with a term added, if there is a sixth input, and a ReLU."""
    x, gamma, *_ = call.inputs
    operands = *(*call.inputs, None)[:6], *call.outputs
    numbers = *call.numbers("eps", "momentum"), int(call.attrs["update"]), int(relu)
    channels = Channels.of(x.shape)
    if fits(channels, x.dtype.itemsize):
        arguments = *operands, *channels.shape, *numbers
        blocks = channels.shape[1], 1
        call.launch(PROGRAM, "batch_norm_whole", blocks, *arguments, beside=gamma)
        return
    parts = channels.buffers(call.workspace, 2)
    shape, blocks = channels.arguments, channels.blocks
    call.launch(PROGRAM, "channel_moments", blocks, x, *parts, *shape)
    arguments = *operands, *parts, *shape, *numbers
    call.launch(PROGRAM, "batch_norm", blocks, *arguments, beside=gamma)


def batch_norm_eval(call: KernelCall) -> None:
    """Normalise by the running statistics."""
    x, gamma, *_ = call.inputs
    channels = Channels.of(x.shape)
    arguments = *call.inputs, *call.outputs, *channels.arguments, *call.numbers("eps")
    blocks = channels.blocks
    call.launch(PROGRAM, "batch_norm_eval", blocks, *arguments, beside=gamma)


OPERATIONS: dict[str, Operation] = {
    "batch_norm": Operation(batch_norm, workspace),
    "batch_norm_eval": Operation(batch_norm_eval),
}
