"""Group and layer normalisation (Wu and He, 2018; Ba et al., 2016), sample by sample.

A group of a sample is a row of `length` contiguous elements, processed by one block. A
thread divides to locate its first elements, and adds to locate the next ones. Gamma has
one value for `inner` contiguous elements of a sample: S if it is per channel, 1 if it
is per element. So its gradient is a sum over samples and pixels of (N, values of gamma,
inner), as for a batch normalisation.

With channels last, (N, pixels, C), a group consists of some neighbouring channels of
all pixels of a sample; a gradient of gamma is a sum over all pixels of all samples.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mucudnn.backends.cuda.kernels.launch import (
    Attrs,
    KernelCall,
    Operation,
    Specs,
    as_ncs,
)
from mucudnn.backends.cuda.kernels.reductions import CHANNELS, FINISH, Channels
from mucudnn.backends.cuda.kernels.source import Program

ROWS = r"""
// A row, and a thread's elements of it with their values of gamma: one value for
// `inner` neighbours.
struct Row {
    I begin, first, length, inner, thread, threads;
    __device__ Row(I row, I groups, I length, I inner, I part, I parts)
        : begin(row * length), first(row % groups * length), length(length),
          inner(inner), thread(part * THREADS + threadIdx.x),
          threads(parts * THREADS) {}
    __device__ bool packs() const {
        return length % PACKED == 0 && (inner == 1 || inner >= PACKED);
    }
    struct Steps {
        I i, k, rest, inner;
        // The value of gamma for the j-th of some neighbours.
        __device__ I of(int j) const {
            return inner == 1 ? k + j : k + (rest + j >= inner);
        }
    };
    // Calls `body` for each W neighbours of the thread.
    template <int W, class F> __device__ void each(const F& body) const {
        I j = thread * W, step = threads * W;
        I values = step / inner, over = step % inner;
        Steps at = {begin + j, (first + j) / inner, (first + j) % inner, inner};
        for (; j < length; j += step) {
            body(at);
            at.i += step, at.k += values, at.rest += over;
            if (at.rest >= inner) at.rest -= inner, ++at.k;
        }
    }
};
// The same for a group of a sample with channels last, over all pixels; W at once if
// all tensors are aligned. Only a thread's first position takes divisions.
struct LastRow {
    I C, width, first, length, apiece, begin, own, over, jump;
    __device__ LastRow(I row, I groups, I pixels, I C, bool aligned)
        : C(C), width(C / groups), length(pixels * width),
          apiece(aligned && width % PACKED == 0 ? PACKED : 1) {
        I sample = row / groups, j = threadIdx.x * apiece, step = THREADS * apiece;
        I pixel = j / width, more = step / width;
        first = (row - sample * groups) * width;
        own = first + j - pixel * width;
        begin = (sample * pixels + pixel) * C + own;
        over = step - more * width;
        jump = more * C + over;
    }
    __device__ bool packs() const { return apiece > 1; }
    struct Steps {
        I i, k;
        __device__ I of(int j) const { return k + j; }
    };
    template <int W, class F> __device__ void each(const F& body) const {
        I end = first + width;
        Steps at = {begin, own};
        for (I j = threadIdx.x * W; j < length; j += THREADS * W) {
            body(at);
            at.i += jump, at.k += over;
            if (at.k >= end) at.k -= width, at.i += C - width;
        }
    }
};
// Loops over elements `at` of a row of type R, W at once if `packed`.
#define EACH_OF_ROW(row, packed, ...)                                             \
    if (row.packs() && (packed)) {                                                \
        constexpr int W = PACKED;                                                 \
        row.template each<W>([&](const typename R::Steps& at) { __VA_ARGS__ });   \
    } else {                                                                      \
        constexpr int W = 1;                                                      \
        row.template each<W>([&](const typename R::Steps& at) { __VA_ARGS__ });   \
    }

// y = (x - centre) inverse gamma + beta.
template <class R>
__device__ void normalise(const R& row, const T* x, const P* gamma, const P* beta,
                          A centre, A inverse, T* y) {
    EACH_OF_ROW(row, aligned(x) && aligned(y), {
        Pack<T, W> v = load<W>(x + at.i);
        for (int j = 0; j < W; ++j) {
            I k = at.of(j);
            v.at[j] =
                (T)(((A)v.at[j] - centre) * inverse * (A)gamma[k] + (A)beta[k]);
        }
        store(y + at.i, v);
    })
}

// The sums of dy gamma, and of it times deviations, over a block's part of a row.
struct RowSums {
    double sum, dots;
    template <class R>
    __device__ RowSums(const R& row, const T* x, const T* dy, const P* gamma, A centre)
        : sum(0), dots(0) {
        EACH_OF_ROW(row, aligned(x) && aligned(dy), {
            Pack<T, W> v = load<W>(x + at.i), d = load<W>(dy + at.i);
            A part = 0, dot = 0;
            for (int j = 0; j < W; ++j) {
                A weighted = (A)d.at[j] * (A)gamma[at.of(j)];
                part += weighted;
                dot += ((A)v.at[j] - centre) * weighted;
            }
            sum += (double)part;
            dots += (double)dot;
        })
        sum = lane_sum(sum, 1);
        dots = lane_sum(dots, 1);
    }
};

// dx = dy gamma inverse + deviation along + offset.
template <class R>
__device__ void input_grad(const R& row, const T* x, const T* dy, const P* gamma,
                           A centre, A inverse, double sum, double dots, double count,
                           T* dx) {
    double wide = inverse;
    A offset = (A)(-wide * sum / count);
    A along = (A)(-wide * wide * wide * dots / count);
    EACH_OF_ROW(row, aligned(x) && aligned(dy) && aligned(dx), {
        Pack<T, W> v = load<W>(x + at.i), d = load<W>(dy + at.i);
        for (int j = 0; j < W; ++j) {
            A weighted = (A)d.at[j] * (A)gamma[at.of(j)];
            v.at[j] =
                (T)(weighted * inverse + ((A)v.at[j] - centre) * along + offset);
        }
        store(dx + at.i, v);
    })
}
"""
"""Device code of kernels over rows; needs `REDUCE` before it."""

PROGRAM = Program(
    CHANNELS
    + FINISH
    + ROWS
    + r"""
#define FORWARD                                                                   \
    const T *x, const P *gamma, const P *beta, T *y, P *mean, P *inv_std
template <class R> __device__ void forward(const R& row, FORWARD, double eps) {
    I length = row.length;
    double sum = 0, squares = 0;
    EACH_OF_ROW(row, aligned(x), {
        Pack<T, W> v = load<W>(x + at.i);
        A part = 0;
        for (int j = 0; j < W; ++j) part += (A)v.at[j];
        sum += (double)part;
    })
    double average = lane_sum(sum, 1) / length;
    A centre = (A)(P)average;
    EACH_OF_ROW(row, aligned(x), {
        Pack<T, W> v = load<W>(x + at.i);
        A part = 0;
        for (int j = 0; j < W; ++j) {
            A deviation = (A)v.at[j] - centre;
            part += deviation * deviation;
        }
        squares += (double)part;
    })
    A inverse = (A)(1 / sqrt(lane_sum(squares, 1) / length + eps));
    normalise(row, x, gamma, beta, centre, inverse, y);
    if (threadIdx.x != 0) return;
    mean[blockIdx.x] = (P)average;
    inv_std[blockIdx.x] = (P)inverse;
}

KERNEL group_norm(FORWARD, I groups, I length, I inner, double eps) {
    Row row(blockIdx.x, groups, length, inner, 0, 1);
    forward(row, x, gamma, beta, y, mean, inv_std, eps);
}

KERNEL group_norm_last(FORWARD, I groups, I pixels, I C, double eps) {
    LastRow row(blockIdx.x, groups, pixels, C, aligned(x) && aligned(y));
    forward(row, x, gamma, beta, y, mean, inv_std, eps);
}

#define BACKWARD                                                                  \
    const T *x, const T *dy, const P *gamma, const P *mean, const P *inv_std, T *dx
template <class R> __device__ void backward(const R& row, BACKWARD) {
    A centre = (A)mean[blockIdx.x], inverse = (A)inv_std[blockIdx.x];
    RowSums sums(row, x, dy, gamma, centre);
    input_grad(row, x, dy, gamma, centre, inverse, sums.sum, sums.dots, row.length, dx);
}

KERNEL group_norm_grad(BACKWARD, I groups, I length, I inner) {
    Row row(blockIdx.x, groups, length, inner, 0, 1);
    backward(row, x, dy, gamma, mean, inv_std, dx);
}

KERNEL group_norm_grad_last(BACKWARD, I groups, I pixels, I C) {
    LastRow row(blockIdx.x, groups, pixels, C,
                aligned(x) && aligned(dy) && aligned(dx));
    backward(row, x, dy, gamma, mean, inv_std, dx);
}

#define GAMMA_GRAD                                                                \
    const T *x, const T *dy, const P *mean, const P *inv_std, double *gammas,         \
        double *betas, I N, I C, I S, I width, I groups, I pixels
template <int CH> __device__ void gamma_of(GAMMA_GRAD) {
    ChannelsOf<CH> channel(N, C, S, width);
    I each = C / groups, own = channel.own() / each, rest = channel.own() - own * each;
    I group[CH];
    for (int j = 0; j < CH; ++j) {
        group[j] = own;
        if (++rest == each) rest = 0, ++own;
    }
    Tally<CH> dots, sums;
    // Of the elements summed over, `pixels` contiguous ones belong to one sample.
    I sample = (CH > 1 ? channel.start : channel.start / S) / pixels;
    I behind = (sample + 1) * pixels;
    EACH_PACK(channel, aligned(x) && aligned(dy), (x, dy), {
        Pack<T, W> v = found.of[0], d = found.of[1];
        while (pixels > 1 && at.n >= behind) ++sample, behind += pixels;
        for (int j = 0; j < W; ++j) {
            I row = (pixels == 1 ? at.n : sample) * groups + group[OF(j)];
            A normed = ((A)v.at[j] - (A)mean[row]) * (A)inv_std[row];
            dots.add(j, normed * (A)d.at[j]);
            sums.add(j, (A)d.at[j]);
        }
        dots.added();
        sums.added();
    })
    leave_sums(channel, dots, gammas, width);
    leave_sums(channel, sums, betas, width);
}

KERNEL gamma_grad(GAMMA_GRAD) {
    gamma_of<1>(x, dy, mean, inv_std, gammas, betas, N, C, S, width, groups, pixels);
}

KERNEL gamma_grad_last(GAMMA_GRAD) {
    gamma_of<PACKED>(x, dy, mean, inv_std, gammas, betas, N, C, S, width, groups,
                     pixels);
}
"""
)


def group_norm(call: KernelCall) -> None:
    """Normalise each group of channels of each sample by its own statistics."""
    name, blocks, sizes = _variant(call, "group_norm")
    arguments = *call.inputs, *call.outputs, *sizes, *call.numbers("eps")
    call.launch(PROGRAM, name, blocks, *arguments, beside=call.inputs[1])


def group_norm_grad(call: KernelCall) -> None:
    """Compute dgamma and dbeta, then dx, which may overwrite dy."""
    dx, *gradients = call.outputs
    affine_grads(call, gradients)
    name, blocks, sizes = _variant(call, "group_norm_grad")
    arguments = *call.inputs, dx, *sizes
    call.launch(PROGRAM, name, blocks, *arguments, beside=call.inputs[3])


def _variant(call: KernelCall, name: str) -> tuple[str, tuple[int], Sequence[int]]:
    """Return the kernel for this layout, its grid, and its shape arguments."""
    shape, attrs = call.inputs[0].shape, call.attrs
    if _is_last(attrs):
        N, pixels, C = shape
        return f"{name}_last", (N * attrs["groups"],), (attrs["groups"], pixels, C)
    count, *sizes = rows(shape, attrs)
    return name, (count,), sizes


def affine_grads(call: KernelCall, gradients: Sequence[Any]) -> None:
    """Compute dgamma and dbeta from inputs (x, dy, gamma, mean, inv_std)."""
    x, dy, _, mean, inv_std = call.inputs
    views = (v.reshape(_gamma_channels(x.shape, call.attrs)) for v in (x, dy))
    channels = Channels.here(call, *views)
    sums = channels.buffers(call.workspace, 2)
    sizes = call.attrs["groups"], x.shape[1] if _is_last(call.attrs) else 1
    arguments = x, dy, mean, inv_std, *sums, *channels.arguments, *sizes
    blocks, name = channels.blocks, channels.kernel("gamma_grad")
    call.launch(PROGRAM, name, blocks, *arguments, beside=mean)
    for gradient, parts in zip(gradients, sums, strict=True):
        channels.finish(call, PROGRAM, parts, gradient)


def rows(shape: Sequence[int], attrs: Attrs) -> tuple[int, int, int, int]:
    """Return (groups of all samples, groups of a sample, their length, inner)."""
    N, C, S = as_ncs(shape)
    groups = attrs["groups"]
    return N * groups, groups, C // groups * S, 1 if attrs["per_element"] else S


def _gamma_channels(shape: Sequence[int], attrs: Attrs) -> tuple[int, ...]:
    """Return the shape with the values of gamma as channels."""
    N, *rest = shape
    if _is_last(attrs):
        return math.prod(shape[:-1]), shape[-1]
    return (N, math.prod(rest)) if attrs["per_element"] else tuple(shape)


def _is_last(attrs: Attrs) -> bool:
    """Return whether arrays are (N, pixels, C)."""
    return bool(attrs.get("channels_last"))


def affine_workspace(inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    """Return the bytes that `affine_grads` needs."""
    spec = inputs[0]
    return 2 * Channels.most_bytes(
        replace(spec, shape=_gamma_channels(spec.shape, attrs))
    )


OPERATIONS: dict[str, Operation] = {
    "group_norm": Operation(group_norm),
    "group_norm_grad": Operation(group_norm_grad, affine_workspace),
}
