"""Batch normalisation (Ioffe and Szegedy, 2015) and its gradient.

A sum, a ReLU or both may follow in the same launches. A block reads its part of a
channel twice: for the first two moments, and to normalise; each reader adds up the
partial sums itself. If a channel fits a block's shared memory, one launch does both and
reads it once. With channels last, the last block of the first launch adds up the
partial sums and writes the statistics.
"""

from collections.abc import Sequence
from typing import Any

from mucudnn.backends.cuda.kernels.launch import KernelCall, Operation, Specs
from mucudnn.backends.cuda.kernels.reductions import CHANNELS, LAST_BLOCK, Channels
from mucudnn.backends.cuda.kernels.source import THREADS, Program
from mucudnn.ir.tensor import itemsize

_ROOM = 45 << 10
"""Bytes of a channel in shared memory; together with the sums they fit the 48 KiB that
every GPU grants a block by default.
"""


_HELD = 64  # elements a thread keeps in registers, for at least two blocks at once

_FEW_CHANNELS = 64

_SHORT = 16 * THREADS  # elements of a channel that do not occupy more blocks


NORMED = (
    f"""
#define ROOM ({_ROOM} / (int)sizeof(T))
#define HELD (sizeof(T) == 2 ? {_HELD} : (ROOM + THREADS * PACKED - 1) / THREADS / \\
                                          PACKED * PACKED)
"""
    + r"""
// A ReLU that passes NaN.
__device__ A positive(A v) { return v <= 0 ? (A)0 : v; }

// Normalised elements of a channel, from numbers as they are saved.
struct Normed {
    A centre, factor, shift;
    Normed() = default;
    __device__ Normed(P mean, P inverse, P gamma, P beta)
        : centre((A)mean), factor((A)((double)gamma * (double)inverse)),
          shift((A)beta) {}
    __device__ explicit Normed(P mean) : centre((A)mean), factor(0), shift(0) {}
    __device__ Normed(A centre, A factor, A shift)
        : centre(centre), factor(factor), shift(shift) {}
    __device__ A operator()(T x) const {
        return fma((A)x - centre, factor, shift);
    }
    __device__ A masked(T x, A dy) const {
        return (*this)(x) <= vanishing<T>() ? (A)0 : dy;
    }
};

// `Normed` of CH neighbouring channels; without beta only their means are set.
template <int CH> struct NormedOf {
    Normed of[CH];
    NormedOf() = default;
    __device__ NormedOf(I c, const P* gamma, const P* beta, const P* mean,
                        const P* inv_std) {
        for (int j = 0; j < CH; ++j)
            of[j] = beta ? Normed(mean[c + j], inv_std[c + j], gamma[c + j],
                                  beta[c + j])
                         : Normed(mean[c + j]);
    }
};

// A channel's statistics, from its sums about an origin.
struct Moments {
    double average, square, count;
    __device__ Moments(A origin, double sum, double squares, double count)
        : count(count) {
        average = (double)origin + sum / count;
        square = squares - sum * sum / count;
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

// The input's gradient: a linear function of the masked gradient and the input.
struct InputGrad {
    A centre, scale, along, offset;
    InputGrad() = default;
    __device__ InputGrad(P mean, P inv_std, P gamma, double sum, double dot,
                         double count)
        : centre((A)mean) {
        double inverse = (double)inv_std, factor = (double)gamma * inverse;
        scale = (A)factor;
        offset = (A)(-factor * sum / count);
        along = (A)(-factor * inverse * inverse * dot / count);
    }
    __device__ A operator()(T x, A dy) const {
        return dy * scale + ((A)x - centre) * along + offset;
    }
};
"""
)


def fits(channels: Channels, nbytes: int) -> bool:
    """Return whether a channel fits a block, and enough blocks have work."""
    N, C, S = channels.shape
    most = min(_ROOM // nbytes, _HELD * THREADS)
    worth = C >= _FEW_CHANNELS or N * S <= _SHORT
    return channels.width == 1 and 0 < N * S <= most and worth


def workspace(inputs: Specs, *_: object) -> int:
    """Return the bytes of partial sums; none if one launch does everything."""
    channels = Channels.of(inputs[0].shape)
    if fits(channels, itemsize(inputs[0].dtype)):
        return 0
    return 2 * Channels.most_bytes(inputs[0])


def batch_norm_grad(call: KernelCall) -> None:
    """Compute gamma inv_std (dy - mean(dy) - x̂ mean(dy x̂)), dgamma and dbeta."""
    x, dy, gamma, mean, inv_std = call.inputs
    backward(call, (x, dy, None, gamma, None, mean, inv_std, None), call.outputs)


def batch_norm(call: KernelCall) -> None:
    """Normalise by the batch's statistics, and update the running ones."""
    forward(call, relu=False)


def batch_norm_eval(call: KernelCall) -> None:
    """Normalise by the running statistics."""
    x, gamma, *_ = call.inputs
    channels = Channels.here(call, x, *call.outputs)
    arguments = *call.inputs, *call.outputs, *channels.arguments, *call.numbers("eps")
    blocks, name = channels.blocks, channels.kernel("batch_norm_eval")
    call.launch(PROGRAM, name, blocks, *arguments, beside=gamma)


PROGRAM = Program(
    CHANNELS
    + LAST_BLOCK
    + NORMED
    + r"""
// Deviations are from a channel's first element, so that little cancels.
template <bool KEEP, int CH> struct MomentSums {
    A origin[CH];
    Tally<CH> sums, squares;
    __device__ MomentSums(const ChannelsOf<CH>& channel, const T* x, T* room) {
        for (int j = 0; j < CH; ++j) origin[j] = (A)x[(channel.own() + j) * channel.S];
        EACH_PACK(channel, aligned(x), (x), {
            Pack<T, W> v = found.of[0];
            if (KEEP) store(room + at.k, v);
            for (int j = 0; j < W; ++j) {
                A deviation = (A)v.at[j] - origin[OF(j)];
                sums.add(j, deviation);
                squares.add(j, deviation * deviation);
            }
            sums.added();
            squares.added();
        })
    }
};

template <int CH>
__device__ void leave_moments(const T* x, double* sums, double* squares, I N, I C, I S,
                              I width) {
    ChannelsOf<CH> channel(N, C, S, width);
    MomentSums<false, CH> found(channel, x, 0);
    leave_sums(channel, found.sums, sums, width);
    leave_sums(channel, found.squares, squares, width);
}

#define FORWARD                                                                   \
    const T *x, const P *gamma, const P *beta, P *running_mean, P *running_var,   \
        const T *term, T *y, P *mean, P *inv_std
#define RULES double eps, double momentum, I update, I relu

template <bool KEPT, int CH>
__device__ void apply(const ChannelsOf<CH>& channel, const Normed* normed,
                      const T* room, const T* x, const T* term, T* y, bool relu) {
    const T* read = KEPT ? 0 : x;
    EACH_PACK(channel, aligned(x) && aligned(y) && aligned(term), (read, term), {
        Pack<T, W> v = KEPT ? load<W>(room + at.k) : found.of[0];
        for (int j = 0; j < W; ++j) {
            A value = normed[OF(j)](v.at[j]);
            if (term) value += (A)found.of[1].at[j];
            v.at[j] = (T)(relu ? positive(value) : value);
        }
        store(y + at.i, v);
    })
}

template <bool KEPT>
__device__ void normalise(const Channel& channel, const Moments& moments,
                          const T* room, FORWARD, RULES) {
    I c = channel.c;
    if (c >= channel.C) return;
    P centre = (P)moments.average, inverse = moments.inverse(eps);
    Normed normed(centre, inverse, gamma[c], beta[c]);
    apply<KEPT>(channel, &normed, room, x, term, y, relu);
    if (!channel.first() || blockIdx.y != 0) return;
    mean[c] = centre;
    inv_std[c] = inverse;
    if (update) moments.move(running_mean + c, running_var + c, momentum);
}

KERNEL channel_moments(const T* x, double* sums, double* squares, I N, I C, I S,
                       I width) {
    leave_moments<1>(x, sums, squares, N, C, S, width);
}

KERNEL channel_moments_last(const T* x, double* sums, double* squares,
                            long long* arrived, I N, I C, I S, I width) {
    leave_moments<PACKED>(x, sums, squares, N, C, S, width);
    if (!is_last(arrived)) return;
    Gathering<PACKED> all(C, width);
    all.merge(sums);
    all.merge(squares);
}

KERNEL batch_norm_statistics(const T* x, double* sums, double* squares,
                             long long* arrived, P* running_mean, P* running_var,
                             P* mean, P* inv_std, I N, I C, I S, I width, double eps,
                             double momentum, I update) {
    leave_moments<PACKED>(x, sums, squares, N, C, S, width);
    if (!is_last(arrived)) return;
    Gathering<PACKED> all(C, width);
    double sum = all.sum(sums), square = all.sum(squares);
    if (!all.leads()) return;
    I c = all.c;
    Moments moments((A)x[c], sum, square, (double)N);
    mean[c] = (P)moments.average;
    inv_std[c] = moments.inverse(eps);
    if (update) moments.move(running_mean + c, running_var + c, momentum);
}

KERNEL batch_norm_last(const T* x, const P* gamma, const P* beta, const P* mean,
                       const P* inv_std, const T* term, T* y, I N, I C, I S, I width,
                       I relu) {
    ChannelsOf<PACKED> channel(N, C, S, width);
    NormedOf<PACKED> normed(channel.own(), gamma, beta, mean, inv_std);
    apply<false>(channel, normed.of, 0, x, term, y, relu);
}

KERNEL batch_norm(FORWARD, const double* sums, const double* squares, I N, I C, I S,
                  I width, RULES) {
    Channel channel(N, C, S, width);
    I c = channel.own();
    Moments moments((A)x[c * S], lane_total(sums, gridDim.y, C, c, width),
                    lane_total(squares, gridDim.y, C, c, width), (double)N * S);
    normalise<false>(channel, moments, 0, x, gamma, beta, running_mean, running_var,
                     term, y, mean, inv_std, eps, momentum, update, relu);
}

KERNEL batch_norm_whole(FORWARD, I N, I C, I S, RULES) {
    alignas(16) __shared__ T room[ROOM];
    Channel channel(N, C, S, 1);
    MomentSums<true, 1> found(channel, x, room);
    found.sums.settle();
    found.squares.settle();
    Moments moments(found.origin[0], lane_sum(found.sums.far[0], 1),
                    lane_sum(found.squares.far[0], 1), (double)N * S);
    normalise<true>(channel, moments, room, x, gamma, beta, running_mean, running_var,
                    term, y, mean, inv_std, eps, momentum, update, relu);
}

#define EVAL                                                                      \
    const T *x, const P *gamma, const P *beta, const P *mean, const P *var, T *y,     \
        I N, I C, I S, I width, double eps
template <int CH> __device__ void evaluate(EVAL) {
    ChannelsOf<CH> channel(N, C, S, width);
    I c = channel.own();
    A factor[CH], centre[CH], shift[CH];
    for (int j = 0; j < CH; ++j) {
        factor[j] = (A)((double)gamma[c + j] / sqrt((double)var[c + j] + eps));
        centre[j] = (A)mean[c + j], shift[j] = (A)beta[c + j];
    }
    EACH_PACK(channel, aligned(x) && aligned(y), (x), {
        Pack<T, W> v = found.of[0];
        for (int j = 0; j < W; ++j)
            v.at[j] = (T)(((A)v.at[j] - centre[OF(j)]) * factor[OF(j)] + shift[OF(j)]);
        store(y + at.i, v);
    })
}

KERNEL batch_norm_eval(EVAL) {
    evaluate<1>(x, gamma, beta, mean, var, y, N, C, S, width, eps);
}

KERNEL batch_norm_eval_last(EVAL) {
    evaluate<PACKED>(x, gamma, beta, mean, var, y, N, C, S, width, eps);
}
"""
)


def forward(call: KernelCall, *, relu: bool) -> None:
    """Run `batch_norm`, then add a sixth input, if any, and apply a ReLU if asked."""
    x, gamma, *_ = call.inputs
    operands = *(*call.inputs, None)[:6], *call.outputs
    rules = *call.numbers("eps", "momentum"), int(call.attrs["update"])
    numbers = *rules, int(relu)
    channels = Channels.here(call, x, operands[5], call.outputs[0])
    if channels.apiece > 1:
        _forward_last(call, channels, operands, rules, relu=relu)
        return
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


def _forward_last(
    call: KernelCall,
    channels: Channels,
    operands: Sequence[Any],
    rules: tuple[float, ...],
    *,
    relu: bool,
) -> None:
    x, gamma, beta, *running, term, y, mean, inv_std = operands
    parts, shape = channels.buffers(call.workspace, 2), channels.arguments
    sums = x, *parts, *channels.arrived(call)
    arguments = *sums, *running, mean, inv_std, *shape, *rules
    blocks, name = channels.blocks, "batch_norm_statistics"
    call.launch(PROGRAM, name, blocks, *arguments, beside=gamma)
    apply_last(call, channels, (x, gamma, beta, mean, inv_std, term, y), relu=relu)


def apply_last(
    call: KernelCall, channels: Channels, operands: Sequence[Any], *, relu: bool
) -> None:
    """Normalise with channels last.

    Args:
        call: Call with the launcher.
        channels: Division of the channels.
        operands: x, gamma, beta, mean, 1 / standard deviation, a term or None, and y.
        relu: Whether a ReLU follows.
    """
    arguments = *operands, *channels.arguments, int(relu)
    blocks, gamma = channels.blocks, operands[1]
    call.launch(PROGRAM, "batch_norm_last", blocks, *arguments, beside=gamma)


# Gradients of batch normalisation, also fused with a ReLU and a sum before it.
#
# Gradients are masked when they are read. Without a sum the mask is recomputed from the
# input by the formula of the forward pass, rounding by rounding, with its saved
# statistics; the forward result is not read. If a channel fits a block's shared memory,
# one launch does everything and keeps the masked gradient in registers.


BATCH_NORM_GRAD_PROGRAM = Program(
    CHANNELS
    + LAST_BLOCK
    + NORMED
    + r"""
// How a ReLU masks a gradient: not at all; by its result, if given, and the masked
// gradient is stored as the term's; by recomputing the formula; or as arguments imply.
enum Passing { ALL, RESULT, FORMULA, ANY };

template <int CH, Passing BY> struct Gradient {
    T* dterm;
    NormedOf<CH> normed;
    bool result, formula;
    // Masks dy, given x, dy and the result at W neighbours.
    template <int W> __device__ void pass(const Found<W, 3>& found, A* passed) const {
        for (int j = 0; j < W; ++j) {
            A d = (A)found.of[1].at[j];
            if (BY == RESULT || (BY == ANY && result))
                d = (A)found.of[2].at[j] == 0 ? (A)0 : d;
            if (BY == FORMULA || (BY == ANY && formula))
                d = normed.of[OF(j)].masked(found.of[0].at[j], d);
            passed[j] = d;
        }
    }
    // Also adds to the sums, stores the term's gradient, and returns the masked one.
    template <int W>
    __device__ Pack<T, W> count(I i, const Found<W, 3>& found, Tally<CH>& sums,
                                Tally<CH>& dots) const {
        A passed[W];
        pass<W>(found, passed);
        Pack<T, W> narrow;
        for (int j = 0; j < W; ++j) {
            sums.add(j, passed[j]);
            A deviation = (A)found.of[0].at[j] - normed.of[OF(j)].centre;
            dots.add(j, deviation * passed[j]);
            narrow.at[j] = (T)passed[j];
        }
        if ((BY == RESULT || BY == ANY) && dterm) store(dterm + i, narrow);
        sums.added();
        dots.added();
        return narrow;
    }
};

#define BACKWARD                                                                  \
    const T *x, const T *dy, const T *y, const P *gamma, const P *beta,           \
        const P *mean, const P *inv_std, T *dterm

#define BACKWARD_GIVEN x, dy, y, gamma, beta, mean, inv_std, dterm
// One loop for each kind of mask, without a branch inside.
#define BY_PASSING(function, CH, ...)                                             \
    if (y) function<CH, RESULT>(__VA_ARGS__);                                     \
    else if (beta) function<CH, FORMULA>(__VA_ARGS__);                            \
    else function<CH, ALL>(__VA_ARGS__);

#define SHAPE I N, I C, I S, I width
template <int CH, Passing BY>
__device__ void dots_of(BACKWARD, double* sums, double* dots, SHAPE) {
    ChannelsOf<CH> channel(N, C, S, width);
    const T* result = BY == RESULT ? y : 0;
    const P* shift = BY == FORMULA ? beta : 0;
    NormedOf<CH> normed(channel.own(), gamma, shift, mean, inv_std);
    Gradient<CH, BY> gradient{dterm, normed, result, shift};
    Tally<CH> ones, products;
    bool packed = aligned(x) && aligned(dy) && aligned(y) && aligned(dterm);
    EACH_PACK(channel, packed, (x, dy, result), {
        gradient.template count<W>(at.i, found, ones, products);
    })
    leave_sums(channel, ones, sums, width);
    leave_sums(channel, products, dots, width);
}

KERNEL channel_dots(BACKWARD, double* sums, double* dots, SHAPE) {
    BY_PASSING(dots_of, 1, BACKWARD_GIVEN, sums, dots, N, C, S, width)
}

KERNEL channel_dots_last(BACKWARD, double* sums, double* dots, long long* arrived,
                         SHAPE) {
    BY_PASSING(dots_of, PACKED, BACKWARD_GIVEN, sums, dots, N, C, S, width)
    if (!is_last(arrived)) return;
    Gathering<PACKED> all(C, width);
    all.merge(sums);
    all.merge(dots);
}

#define RESULTS                                                                   \
    T *dx, P *dgamma, P *dbeta, const double *sums, const double *dots, I parts, I N, \
        I C, I S, I width
// The ReLU's result is not read again: dy is the masked gradient that was stored.
template <int CH, Passing BY> __device__ void input_grad(BACKWARD, RESULTS) {
    ChannelsOf<CH> channel(N, C, S, width);
    // Each thread computes the coefficients of one channel for all threads; partial
    // sums that are not merged yet are added by all of them.
    __shared__ InputGrad all[CH == 1 ? 32 : CH * MOST_WIDTH];
    I own = threadIdx.x, c = (I)blockIdx.x * width * CH + own;
    double sum = 0, dot = 0;
    if (CH == 1) {
        sum = lane_total(sums, parts, C, channel.c, width);
        dot = lane_total(dots, parts, C, channel.c, width);
    }
    if (own < width * CH && c < C) {
        if (CH > 1) sum = total(sums, parts, C, c), dot = total(dots, parts, C, c);
        all[own] = InputGrad(mean[c], inv_std[c], gamma[c], sum, dot, (double)N * S);
        if (blockIdx.y == 0) {
            dgamma[c] = (P)(dot * (double)inv_std[c]);
            dbeta[c] = (P)sum;
        }
    }
    __syncthreads();
    InputGrad grad[CH];
    Gradient<CH, BY> gradient;
    for (int j = 0; j < CH; ++j) {
        grad[j] = all[threadIdx.x % width * CH + j];
        A shift = BY == FORMULA ? (A)beta[channel.own() + j] : (A)0;
        gradient.normed.of[j] = Normed(grad[j].centre, grad[j].scale, shift);
    }
    const T* none = 0;
    EACH_PACK(channel, aligned(x) && aligned(dx) && aligned(dy), (x, dy, none), {
        Pack<T, W> v = found.of[0];
        A passed[W];
        gradient.template pass<W>(found, passed);
        for (int j = 0; j < W; ++j) v.at[j] = (T)grad[OF(j)](v.at[j], passed[j]);
        store(dx + at.i, v);
    })
}
#define GIVEN BACKWARD_GIVEN, dx, dgamma, dbeta, sums, dots, parts, N, C, S, width

KERNEL batch_norm_grad(BACKWARD, RESULTS) {
    if (beta) input_grad<1, FORMULA>(GIVEN);
    else input_grad<1, ALL>(GIVEN);
}

KERNEL batch_norm_grad_last(BACKWARD, RESULTS) {
    if (beta) input_grad<PACKED, FORMULA>(GIVEN);
    else input_grad<PACKED, ALL>(GIVEN);
}

#define WHOLE BACKWARD, T *dx, P *dgamma, P *dbeta, I N, I C, I S
template <int W, Passing BY>
__device__ void whole_grad(WHOLE, const Channel& channel, T* room) {
    I c = channel.c;
    const T* result = BY == RESULT || BY == ANY ? y : 0;
    const P* shift = BY == FORMULA || BY == ANY ? beta : 0;
    NormedOf<1> normed(c, gamma, shift, mean, inv_std);
    Gradient<1, BY> gradient{dterm, normed, result, shift};
    Pack<T, W> kept[HELD / W];
    Tally<1> ones, products;
    channel.template few<W, HELD / W>([&](const Element& at, int turn) {
        Found<W, 3> found;
        found.read(at.i, x, dy, result);
        store(room + at.k, found.of[0]);
        kept[turn] = gradient.template count<W>(at.i, found, ones, products);
    });
    double sum = lane_sum(ones.far[0], 1), dot = lane_sum(products.far[0], 1);
    InputGrad grad(mean[c], inv_std[c], gamma[c], sum, dot, (double)N * S);
    channel.template few<W, HELD / W>([&](const Element& at, int turn) {
        Pack<T, W> v = load<W>(room + at.k);
        for (int j = 0; j < W; ++j) v.at[j] = (T)grad(v.at[j], (A)kept[turn].at[j]);
        store(dx + at.i, v);
    });
    if (!channel.first()) return;
    dgamma[c] = (P)(dot * (double)inv_std[c]);
    dbeta[c] = (P)sum;
}

KERNEL batch_norm_grad_whole(WHOLE) {
    alignas(16) __shared__ T room[ROOM];
    Channel channel(N, C, S, 1);
    bool packed = channel.packs && aligned(x) && aligned(dx) && aligned(dy) &&
                  aligned(y) && aligned(dterm);
#define WHOLE_GIVEN BACKWARD_GIVEN, dx, dgamma, dbeta, N, C, S, channel, room
    if (packed) { BY_PASSING(whole_grad, PACKED, WHOLE_GIVEN) }
    else whole_grad<1, ANY>(WHOLE_GIVEN);  // long enough once
}
"""
)


def backward(
    call: KernelCall, operands: tuple[Any, ...], results: Sequence[Any]
) -> None:
    """Compute the gradients of a batch normalisation and an optional ReLU.

    Args:
        call: Call with the launcher.
        operands: x, dy, the ReLU's result, gamma, beta, mean, 1 / standard deviation
            and the term's gradient. The mask comes from the result if given, or from x
            if beta is given; missing operands are None.
        results: dx, dgamma and dbeta.
    """
    x, dy, y, gamma, _, mean, inv_std, dterm = operands
    channels = Channels.here(call, x, dy, y, dterm, results[0])
    if fits(channels, x.dtype.itemsize):
        arguments = *operands, *results, *channels.shape
        blocks, name = (channels.shape[1], 1), "batch_norm_grad_whole"
        call.launch(BATCH_NORM_GRAD_PROGRAM, name, blocks, *arguments, beside=mean)
        return
    parts = channels.buffers(call.workspace, 2)
    partial_sums(call, channels, operands, parts)
    if y is not None:  # dterm now holds the masked gradient
        operands = x, dterm, None, gamma, None, mean, inv_std, None
    arguments = *operands, *results, *parts, channels.left, *channels.arguments
    blocks, name = channels.blocks, channels.kernel("batch_norm_grad")
    call.launch(BATCH_NORM_GRAD_PROGRAM, name, blocks, *arguments, beside=mean)


def partial_sums(
    call: KernelCall, channels: Channels, operands: Sequence[Any], parts: Sequence[Any]
) -> None:
    """Sum gradients, and gradients times deviations, in `channels.left` parts."""
    sums = *parts, *channels.arrived(call)
    arguments = *operands, *sums, *channels.arguments
    blocks, name = channels.blocks, channels.kernel("channel_dots")
    call.launch(BATCH_NORM_GRAD_PROGRAM, name, blocks, *arguments, beside=operands[5])


OPERATIONS: dict[str, Operation] = {
    "batch_norm": Operation(batch_norm, workspace),
    "batch_norm_eval": Operation(batch_norm_eval),
    "batch_norm_grad": Operation(batch_norm_grad, workspace),
}
