"""Batch and group normalisation of slices of a batch.

A slice's statistics are its count, its mean and its sum of squares about the mean, in
double precision. Sums over a slice are computed by the kernels for whole batches.
"""

import math
from collections.abc import Sequence
from typing import Any

from mucudnn.backends.cuda.kernels.batch_norm import (
    PROGRAM as WHOLE_BATCH,
    apply_last,
    partial_sums,
)
from mucudnn.backends.cuda.kernels.group_norm import (
    affine_grads,
    affine_workspace,
    rows,
)
from mucudnn.backends.cuda.kernels.launch import (
    THREADS,
    KernelCall,
    Operation,
    Program,
    Specs,
    flat,
)
from mucudnn.backends.cuda.kernels.reductions import Channels, channel_sums

BATCH = Program.load("kernels/split_batch_norm.cu")
GROUP = Program.load("kernels/split_group_norm.cu")
_FEWEST = 8  # least elements per thread for which another block pays off
_MOST_PARTS = 64


def batch_norm_sums(call: KernelCall) -> None:
    """Compute (count, mean, sum of squares about it) of each channel, (3, C)."""
    _write_moments(call, Channels.here(call, call.inputs[0]))


def batch_norm_merge(call: KernelCall) -> None:
    """Compute the batch's mean and inv_std; update the running statistics."""
    *slices, mean, var = call.inputs
    _merge_moments(call, slices, (mean, var))


def batch_norm_apply(call: KernelCall) -> None:
    """Normalise a slice by the statistics of its batch."""
    x, gamma, *_ = call.inputs
    channels = Channels.here(call, x, *call.outputs)
    if channels.apiece > 1:
        operands = *call.inputs, None, *call.outputs
        apply_last(call, channels, operands, relu=False)
        return
    arguments = *call.inputs, *call.outputs, *channels.arguments
    channels.launch(call, BATCH, "batch_norm_apply", *arguments, beside=gamma)


def batch_norm_grad_sums(call: KernelCall) -> None:
    """Compute a slice's share of dgamma and of dbeta."""
    x, dy, mean, inv_std = call.inputs
    channels = Channels.here(call, x, dy)
    parts = channels.buffers(call.workspace, 2)
    operands = x, dy, None, None, None, mean, inv_std, None
    partial_sums(call, channels, operands, parts)
    C = channels.shape[1]
    finished = inv_std, *call.outputs, *parts, channels.left, C
    call.launch(BATCH, "batch_norm_grad_sums", flat(C), *finished)


def batch_norm_grad_apply(call: KernelCall) -> None:
    """Compute a slice's gamma inv_std (dy - (dbeta + x̂ dgamma) / count)."""
    x, dy, gamma, *_ = call.inputs
    channels = Channels.here(call, x, dy, *call.outputs)
    operands = *call.inputs, *call.outputs, *channels.arguments
    arguments = *operands, float(call.attrs["count"])
    channels.launch(call, BATCH, "batch_norm_grad_apply", *arguments, beside=gamma)


# Group and layer normalisation of image strips, by blocks that share a group.
#
# The moments of a strip's groups come from the kernels of batch normalisation, which
# see the groups of all samples as the channels of one sample.


def group_norm_sums(call: KernelCall) -> None:
    """Compute (count, mean, sum of squares about it) of each group, (3, N, groups)."""
    _write_moments(call, _as_channels(call.inputs, call.outputs))


def group_norm_merge(call: KernelCall) -> None:
    """Compute the mean and inv_std of each group."""
    # Groups have no running statistics: the outputs stand in and are not updated.
    _merge_moments(call, call.inputs, call.outputs)


def group_norm_apply(call: KernelCall) -> None:
    """Normalise a strip by the statistics of its image."""
    blocks, sizes = _parts(call)
    arguments = *call.inputs, *call.outputs, *sizes
    call.launch(GROUP, "group_norm_apply", blocks, *arguments, beside=call.inputs[1])


def group_norm_grad_sums(call: KernelCall) -> None:
    """Compute a strip's share of dgamma and dbeta, and of its groups' sums."""
    affine_grads(call, call.outputs[:2])
    (count, _), sizes = _parts(call)
    arguments = *call.inputs[:4], call.outputs[2], *sizes
    beside = call.inputs[3]
    call.launch(GROUP, "group_norm_totals", (count,), *arguments, beside=beside)


def group_norm_grad_apply(call: KernelCall) -> None:
    """Compute dx of a strip from the sums of its whole image."""
    blocks, sizes = _parts(call)
    arguments = *call.inputs, *call.outputs, *sizes, float(call.attrs["count"])
    beside = call.inputs[3]
    call.launch(GROUP, "group_norm_grad_apply", blocks, *arguments, beside=beside)


def _write_moments(call: KernelCall, channels: Channels) -> None:
    """Write count, mean and sum of squares about it of the channels of a tensor."""
    (x,), (stats,) = call.inputs, call.outputs
    sums, squares = channels.buffers(call.workspace, 2)
    partial = x, sums, squares, *channels.arrived(call)
    arguments = *partial, *channels.arguments
    channels.launch(call, WHOLE_BATCH, "channel_moments", *arguments)
    finished = x, sums, squares, stats, channels.left, *channels.shape
    call.launch(BATCH, "finish_moments", flat(channels.shape[1]), *finished)


def _merge_moments(
    call: KernelCall, slices: Sequence[Any], running: Sequence[Any]
) -> None:
    """Merge the moments of slices; write mean, inv_std and running statistics."""
    momentum = float(call.attrs.get("momentum", 0.0))
    update = int(call.attrs.get("update", False))
    C = running[0].size
    blocks = flat(C)
    for number, stats in enumerate(slices):
        first = int(number == 0)
        arguments = stats, call.workspace, running[0], C, first
        call.launch(BATCH, "join_moments", blocks, *arguments, like=running[0])
    numbers = *call.numbers("eps"), momentum, update
    arguments = call.workspace, *running, *call.outputs, C, *numbers
    call.launch(BATCH, "batch_norm_merge", blocks, *arguments, like=running[0])


def _parts(call: KernelCall) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Return the grid (groups of all samples, blocks per group) and the sizes."""
    count, groups, length, inner = rows(call.inputs[0].shape, call.attrs)
    parts = min(_MOST_PARTS, max(1, length // (THREADS * _FEWEST)))
    return (count, parts), (groups, length, inner)


def _as_channels(inputs: Specs, outputs: Specs) -> Channels:
    """View the groups of all samples as the channels of one sample."""
    count = math.prod(outputs[0].shape[1:])
    return Channels.of((1, count, math.prod(inputs[0].shape) // count))


def _moment_bytes(inputs: Specs, *_: object) -> int:
    """Return the bytes of the workspace in which moments are merged."""
    return inputs[0].nbytes


OPERATIONS: dict[str, Operation] = {
    "batch_norm_apply": Operation(batch_norm_apply),
    "batch_norm_grad_apply": Operation(batch_norm_grad_apply),
    "batch_norm_grad_sums": Operation(batch_norm_grad_sums, channel_sums(2)),
    "batch_norm_merge": Operation(batch_norm_merge, _moment_bytes),
    "batch_norm_sums": Operation(batch_norm_sums, channel_sums(2)),
    "group_norm_apply": Operation(group_norm_apply),
    "group_norm_grad_apply": Operation(group_norm_grad_apply),
    "group_norm_grad_sums": Operation(group_norm_grad_sums, affine_workspace),
    "group_norm_merge": Operation(group_norm_merge, _moment_bytes),
    "group_norm_sums": Operation(
        group_norm_sums, lambda x, y, _: 2 * _as_channels(x, y).nbytes
    ),
}
