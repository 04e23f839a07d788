"""Losses with their gradients, and accuracy.

A block takes 32 neighbouring pixels (more if there are few classes), or one sample
without pixels, and leaves its part of the sum in the workspace. A final block adds the
parts in order. Gradients read logarithms of probabilities, none of which is rounded to
0 or 1. Logits may be narrower than the logarithms and losses; gradients have the type
of the logits.

A kernel cannot raise an error. If a label is not a class, the loss is NaN and the
accuracy counts the answer as wrong; nothing is read or written out of bounds.
"""

from collections.abc import Sequence

from mucudnn.backends.cuda.kernels.launch import (
    KernelCall,
    Operation,
    as_ncs,
    flat,
    walking,
)
from mucudnn.backends.cuda.kernels.pooling import WALK
from mucudnn.backends.cuda.kernels.reductions import PARTIALS, REDUCE, partials
from mucudnn.backends.cuda.kernels.source import THREADS, Program

GIVEN = "logarithms_given"
"""Attribute of `softmax_cross_entropy`: the second result was already computed by a
library, and only the loss is missing.
"""

_LANES = 32

PROGRAM = Program(
    REDUCE
    + WALK
    + r"""
typedef long long Label;
// Elements of one access to the wider of two tensors.
#define BOTH_PACKED ((int)(16 / (sizeof(T) > sizeof(P) ? sizeof(T) : sizeof(P))))

// As `lane_sum`, for the maximum.
__device__ A lane_max(A value, I width) {
    __shared__ A highest[THREADS];
    for (int other = 16; other >= width; other /= 2) {
        A theirs = __shfl_xor_sync(0xffffffffu, value, other);
        if (theirs > value) value = theirs;
    }
    __syncthreads();
    highest[threadIdx.x] = value;
    __syncthreads();
    I apart = width < 32 ? 32 : width;
    for (I each = threadIdx.x & (width - 1); each < THREADS; each += apart)
        if (highest[each] > value) value = highest[each];
    return value;
}

// Lanes are pixels; the threads of a lane share its classes. Classes are contiguous if
// a sample has a single pixel, and then W of them are read at once.
#define EACH_CLASS(...)                                                           \
    if (packed) {                                                                 \
        constexpr int W = BOTH_PACKED;                                            \
        I c = row * W, i = start + c, next = apart * W;                           \
        for (; c < stop; c += next, i += next) {                                  \
            __VA_ARGS__                                                           \
        }                                                                         \
    } else {                                                                      \
        constexpr int W = 1;                                                      \
        I c = row, i = start + c * S;                                             \
        for (; c < stop; c += apart, i += apart * S) {                            \
            __VA_ARGS__                                                           \
        }                                                                         \
    }
#define EACH_PIXEL(pixel)                                                         \
    I lane = threadIdx.x % width, row = threadIdx.x / width;                      \
    I pixels = N * S, apart = THREADS / width;                                    \
    for (I base = blockIdx.x * width, pixel = base + lane; base < pixels;         \
         base += (I)gridDim.x * width, pixel = base + lane)

KERNEL softmax_cross_entropy(const T* x, const Label* labels, P* logs, double* parts,
                             I N, I C, I S, I width) {
    double loss = 0;
    bool packed = S == 1 && C % BOTH_PACKED == 0 && aligned(x) && aligned(logs);
    EACH_PIXEL(pixel) {
        bool here = pixel < pixels;
        I start = here ? pixel / S * C * S + pixel % S : 0, stop = here ? C : 0;
        A highest = -(A)INFINITY;
        EACH_CLASS({
            Pack<T, W> v = load<W>(x + i);
            for (int j = 0; j < W; ++j)
                if ((A)v.at[j] > highest) highest = (A)v.at[j];
        })
        highest = lane_max(highest, width);
        double sum = 0;
        EACH_CLASS({
            Pack<T, W> v = load<W>(x + i);
            for (int j = 0; j < W; ++j) sum += (double)exp((A)v.at[j] - highest);
        })
        sum = log(lane_sum(sum, width));
        EACH_CLASS({
            Pack<T, W> v = load<W>(x + i);
            Pack<P, W> made;
            for (int j = 0; j < W; ++j)
                made.at[j] = (P)((A)v.at[j] - highest - (A)sum);
            store(logs + i, made);
        })
        if (!here || row != 0) continue;
        Label label = labels[pixel];
        if (label < 0 || label >= C) loss += (double)NAN;
        else loss += sum - (double)((A)x[start + (I)label * S] - highest);
    }
    loss = lane_sum(loss, 1);
    if (threadIdx.x == 0) parts[blockIdx.x] = loss;
}

// The loss from known logarithms. If a label's is too low for the type, the
// logits tell its distance from the highest.
KERNEL picked_mean(const T* x, const P* logs, const Label* labels, double* parts,
                   I pixels, I C, I S) {
    double loss = 0;
    EACH(pixel, pixels) {
        Label label = labels[pixel];
        if (label < 0 || label >= C) {
            loss += (double)NAN;
            continue;
        }
        I start = pixel / S * C * S + pixel % S, own = start + (I)label * S;
        double below = -(double)(A)logs[own];
        if (below == (double)INFINITY) {
            I best = start;
            for (I i = start; i < start + C * S; i += S)
                if ((A)x[i] > (A)x[best]) best = i;
            below = (double)((A)x[best] - (A)x[own]) - (double)(A)logs[best];
        }
        loss += below;
    }
    loss = lane_sum(loss, 1);
    if (threadIdx.x == 0) parts[blockIdx.x] = loss;
}

KERNEL softmax_cross_entropy_grad(const P* logs, const Label* labels, const P* dloss,
                                  T* dx, I count, I C, I S, double labelled) {
    A factor = (A)((double)dloss[0] / labelled);
    EACH_AT(at, count, S, C, 1) {
        bool own = labels[at.image * S + at.w] == at.h;
        A low = (A)logs[at.i];
        dx[at.i] = (T)((own ? expm1(low) : exp(low)) * factor);
    }
}

KERNEL accuracy(const T* x, const Label* labels, double* parts, I N, I C, I S, I width,
                I most) {
    double right = 0;
    bool packed = S == 1 && C % BOTH_PACKED == 0 && aligned(x);
    EACH_PIXEL(pixel) {
        bool here = pixel < pixels;
        Label label = here ? labels[pixel] : -1;
        here = label >= 0 && label < C;
        I start = here ? pixel / S * C * S + pixel % S : 0, stop = here ? C : 0;
        A own = here ? (A)x[start + (I)label * S] : (A)0;
        double above = 0;
        EACH_CLASS({
            Pack<T, W> v = load<W>(x + i);
            for (int j = 0; j < W; ++j) above += (A)v.at[j] > own;
        })
        above = lane_sum(above, width);
        if (here && row == 0 && above < most && own == own) right += 1;
    }
    right = lane_sum(right, 1);
    if (threadIdx.x == 0) parts[blockIdx.x] = right;
}

KERNEL mean_squared_error(const T* a, const T* b, double* parts, I count) {
    double sum = 0;
    EACH(i, count) {
        A difference = (A)a[i] - (A)b[i];
        sum += (double)difference * difference;
    }
    sum = lane_sum(sum, 1);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

KERNEL mean_squared_error_grad(const T* a, const T* b, const T* dloss, T* dx, I count,
                               double compared) {
    A factor = (A)(2 * (double)dloss[0] / compared);
    EACH(i, count) dx[i] = (T)(((A)a[i] - (A)b[i]) * factor);
}

__device__ double sum_of(const double* parts, I count) {
    double sum = 0;
    for (I i = threadIdx.x; i < count; i += THREADS) sum += parts[i];
    return lane_sum(sum, 1);
}

KERNEL finish_mean(const double* parts, T* out, I count, double divisor) {
    double sum = sum_of(parts, count);
    if (threadIdx.x == 0) out[0] = (T)(sum / divisor);
}

KERNEL finish_count(const double* parts, long long* out, I count, I more) {
    double sum = sum_of(parts, count);
    if (threadIdx.x == 0) out[0] = (more ? out[0] : 0) + (long long)sum;
}

KERNEL finish_float(const double* parts, T* out, I count, I more) {
    double sum = sum_of(parts, count);
    if (threadIdx.x == 0) out[0] = (T)(A)((more ? (double)out[0] : 0) + sum);
}
"""
)


def softmax_cross_entropy(call: KernelCall) -> None:
    """Compute (mean of -log p[label], log p)."""
    (x, labels), (_, logs) = call.inputs, call.outputs
    if call.attrs.get(GIVEN):
        blocks, sizes = (partials(labels.size),), (labels.size, *as_ncs(x.shape)[1:])
        given = x, logs, labels, call.workspace, *sizes
        call.launch(PROGRAM, "picked_mean", blocks, *given, beside=logs)
    else:
        blocks, shape = _pixels(x.shape)
        arguments = x, labels, logs, call.workspace, *shape
        call.launch(PROGRAM, "softmax_cross_entropy", blocks, *arguments, beside=logs)
    _finish_mean(call, blocks, call.attrs.get("count", labels.size))


def softmax_cross_entropy_grad(call: KernelCall) -> None:
    """Compute (p - [1 at the label]) dloss / number of labels, from log p."""
    logs, (dx,) = call.inputs[0], call.outputs
    _, C, S = as_ncs(logs.shape)
    name = "softmax_cross_entropy_grad"
    labelled = float(call.attrs.get("count", call.inputs[1].size))
    arguments = *call.inputs, dx, logs.size, C, S, labelled
    call.launch(PROGRAM, name, walking(logs.size), *arguments, like=dx, beside=logs)


def mean_squared_error(call: KernelCall) -> None:
    """Compute the mean of (prediction - target)²."""
    size = call.inputs[0].size
    blocks = (partials(size),)
    arguments = *call.inputs, call.workspace, size
    call.launch(PROGRAM, "mean_squared_error", blocks, *arguments)
    _finish_mean(call, blocks, call.attrs.get("count", size))


def mean_squared_error_grad(call: KernelCall) -> None:
    """Compute 2 (prediction - target) dloss / number of elements."""
    (dx,) = call.outputs
    blocks = flat(dx.size)
    arguments = *call.inputs, dx, dx.size, float(call.attrs.get("count", dx.size))
    call.launch(PROGRAM, "mean_squared_error_grad", blocks, *arguments)


def accuracy(call: KernelCall) -> None:
    """Count the labels that have fewer than k logits above their own.

    A third input is a previous count, whose memory the result shares.
    """
    x, labels, *before = call.inputs
    blocks, shape = _pixels(x.shape)
    arguments = x, labels, call.workspace, *shape, call.attrs["k"]
    call.launch(PROGRAM, "accuracy", blocks, *arguments)
    out = call.outputs[0]
    parts = call.workspace, out, blocks[0], int(bool(before))
    if out.dtype.name == "int64":
        call.launch(PROGRAM, "finish_count", (1,), *parts, like=x)
    else:  # as a result of the network it has the network's type
        call.launch(PROGRAM, "finish_float", (1,), *parts, like=out)


def _pixels(shape: Sequence[int]) -> tuple[tuple[int], tuple[int, int, int, int]]:
    """Return (blocks, (N, C, S, width)) of a kernel over pixels."""
    N, C, S = as_ncs(shape)
    # With few classes fewer threads share a lane, so there are more lanes.
    sharing = 1 << (min(C, THREADS // _LANES).bit_length() - 1) if C else 1
    width = 1 if S == 1 else THREADS // sharing
    return (min(PARTIALS, -(-N * S // width)),), (N, C, S, width)


def _finish_mean(call: KernelCall, blocks: tuple[int], divisor: int) -> None:
    """Add the blocks' parts in the workspace, into the first output."""
    out = call.outputs[0]
    arguments = call.workspace, out, blocks[0], float(divisor)
    call.launch(PROGRAM, "finish_mean", (1,), *arguments, like=out)


def _parts(*_: object) -> int:
    return 8 * PARTIALS


OPERATIONS: dict[str, Operation] = {
    "accuracy": Operation(accuracy, _parts),
    "mean_squared_error": Operation(mean_squared_error, _parts),
    "mean_squared_error_grad": Operation(mean_squared_error_grad),
    "softmax_cross_entropy": Operation(softmax_cross_entropy, _parts),
    "softmax_cross_entropy_grad": Operation(softmax_cross_entropy_grad),
}
