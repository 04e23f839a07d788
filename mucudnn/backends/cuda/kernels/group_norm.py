"""Group and layer normalisation (Wu and He, 2018; Ba et al., 2016), sample by sample.

A group of a sample is a row of `length` neighbouring elements, and a block takes one.
Gamma has one value for `inner` neighbouring elements of a sample: S if it is a
channel's, 1 if it is an element's. So seen, its gradient is a sum over samples and
pixels of (N, values of gamma, inner), as a batch normalisation's.
"""

import math
from collections.abc import Sequence
from typing import Any

from mucudnn.backends.cuda.kernels.program import (
    Attrs,
    KernelCall,
    Operation,
    Program,
    Specs,
    as_ncs,
)
from mucudnn.backends.cuda.kernels.sums import CHANNELS, FINISH, Channels

__all__ = ["OPERATIONS", "PROGRAM", "affine_grads", "affine_workspace", "rows"]

PROGRAM = Program(
    CHANNELS
    + FINISH
    + r"""
#define EACH_OF_ROW(j) for (I j = threadIdx.x; j < length; j += THREADS)

KERNEL group_norm(const T* x, const P* gamma, const P* beta, T* y, P* mean, P* inv_std,
                  I groups, I length, I inner, double eps) {
    I row = blockIdx.x, first = row % groups * length;
    x += row * length;
    y += row * length;
    double sum = 0, squares = 0;
    EACH_OF_ROW(j) sum += (double)x[j];
    double average = lane_sum(sum, 1) / length;
    A centre = (A)(P)average;
    EACH_OF_ROW(j) {
        A deviation = (A)x[j] - centre;
        squares += (double)deviation * deviation;
    }
    A inverse = (A)(1 / sqrt(lane_sum(squares, 1) / length + eps));
    EACH_OF_ROW(j) {
        I k = (first + j) / inner;
        y[j] = (T)(((A)x[j] - centre) * inverse * (A)gamma[k] + (A)beta[k]);
    }
    if (threadIdx.x != 0) return;
    mean[row] = (P)average;
    inv_std[row] = (P)inverse;
}

KERNEL group_norm_grad(const T* x, const T* dy, const P* gamma, const P* mean,
                       const P* inv_std, T* dx, I groups, I length, I inner) {
    I row = blockIdx.x, first = row % groups * length;
    x += row * length;
    dy += row * length;
    dx += row * length;
    A centre = (A)mean[row], inverse = (A)inv_std[row];
    double sum = 0, dots = 0;
    EACH_OF_ROW(j) {
        A weighted = (A)dy[j] * (A)gamma[(first + j) / inner];
        sum += (double)weighted;
        dots += (double)((A)x[j] - centre) * weighted;
    }
    double wide = inverse;
    A offset = (A)(-wide * lane_sum(sum, 1) / length);
    A along = (A)(-wide * wide * wide * lane_sum(dots, 1) / length);
    EACH_OF_ROW(j) {
        A weighted = (A)dy[j] * (A)gamma[(first + j) / inner];
        dx[j] = (T)(weighted * inverse + ((A)x[j] - centre) * along + offset);
    }
}

KERNEL gamma_grad(const T* x, const T* dy, const P* mean, const P* inv_std,
                  double* gammas, double* betas, I N, I C, I S, I width, I groups) {
    Channel channel(N, C, S, width);
    I g = channel.c / (C / groups);
    double dot = 0, sum = 0;
    EACH_PACK(channel, aligned(x) && aligned(dy), {
        Pack<T, W> v = load<W>(x + at.i), d = load<W>(dy + at.i);
        I row = at.n * groups + g;
        for (int j = 0; j < W; ++j) {
            A normed = ((A)v.at[j] - (A)mean[row]) * (A)inv_std[row];
            dot += (double)normed * (double)(A)d.at[j];
            sum += (double)(A)d.at[j];
        }
    })
    channel.leave(gammas, lane_sum(dot, width));
    channel.leave(betas, lane_sum(sum, width));
}
"""
)


def group_norm(call: KernelCall) -> None:
    """Normalise each group of channels of each sample by its own statistics."""
    count, *sizes = rows(call.inputs[0].shape, call.attrs)
    arguments = *call.inputs, *call.outputs, *sizes, *call.numbers("eps")
    call.launch(PROGRAM, "group_norm", (count,), *arguments, beside=call.inputs[1])


def group_norm_grad(call: KernelCall) -> None:
    """Dx as batch normalisation's, over groups; after dgamma, dbeta: it may be dy."""
    dx, *gradients = call.outputs
    affine_grads(call, gradients)
    x, mean = call.inputs[0], call.inputs[3]
    count, *sizes = rows(x.shape, call.attrs)
    arguments = *call.inputs, dx, *sizes
    call.launch(PROGRAM, "group_norm_grad", (count,), *arguments, beside=mean)


def affine_grads(call: KernelCall, gradients: Sequence[Any]) -> None:
    """Dgamma and dbeta of (x, dy, gamma, mean, inv_std)."""
    x, dy, _, mean, inv_std = call.inputs
    channels = _channels(x.shape, call.attrs)
    sums = channels.buffers(call.workspace, 2)
    arguments = x, dy, mean, inv_std, *sums, *channels.arguments, call.attrs["groups"]
    call.launch(PROGRAM, "gamma_grad", channels.blocks, *arguments, beside=mean)
    for gradient, parts in zip(gradients, sums, strict=True):
        channels.finish(call, PROGRAM, parts, gradient)


def rows(shape: Sequence[int], attrs: Attrs) -> tuple[int, int, int, int]:
    """(groups of all samples, groups of one, their length, inner)."""
    N, C, S = as_ncs(shape)
    groups = attrs["groups"]
    return N * groups, groups, C // groups * S, 1 if attrs["per_element"] else S


def _channels(shape: Sequence[int], attrs: Attrs) -> Channels:
    """With the values of gamma as channels."""
    N, *rest = shape
    return Channels.of((N, math.prod(rest)) if attrs["per_element"] else shape)


def affine_workspace(inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    """Bytes that `affine_grads` needs."""
    return 2 * _channels(inputs[0].shape, attrs).nbytes


OPERATIONS: dict[str, Operation] = {
    "group_norm": Operation(group_norm),
    "group_norm_grad": Operation(group_norm_grad, affine_workspace),
}
