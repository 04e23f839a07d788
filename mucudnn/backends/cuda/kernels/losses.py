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
    THREADS,
    KernelCall,
    Operation,
    Program,
    as_ncs,
    flat,
    walking,
)
from mucudnn.backends.cuda.kernels.reductions import PARTIALS, partials

PROGRAM = Program.load("kernels/losses.cu")
GIVEN = "logarithms_given"
"""Attribute of `softmax_cross_entropy`: the second result was already computed by a
library, and only the loss is missing.
"""

_LANES = 32


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
