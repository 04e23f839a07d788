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
    Program,
    Specs,
    as_ncs,
)
from mucudnn.backends.cuda.kernels.reductions import Channels

PROGRAM = Program.load("kernels/group_norm.cu")


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
    channels.launch(call, PROGRAM, "gamma_grad", *arguments, beside=mean)
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
