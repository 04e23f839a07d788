"""Batch normalisation (Ioffe and Szegedy, 2015) and its gradient.

A sum, a ReLU or both may follow in the same launches. A block reads its part of a
channel twice: for the first two moments, and to normalise; each reader adds up the
partial sums itself. If a channel fits a block's shared memory, one launch does both and
reads it once. With channels last, the last block of the first launch adds up the
partial sums and writes the statistics.

Gradients are masked when they are read. Without a sum the mask is recomputed from the
input by the formula of the forward pass, rounding by rounding, with its saved
statistics; the forward result is not read. If a channel fits a block's shared memory,
one launch does everything and keeps the masked gradient in registers.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from mucudnn.backends.cuda.kernels.launch import (
    THREADS,
    KernelCall,
    Operation,
    Program,
    Specs,
    read_constant,
)
from mucudnn.backends.cuda.kernels.reductions import Channels
from mucudnn.ir.tensor import itemsize

PROGRAM = Program.load("kernels/batch_norm.cu")
GRADIENT = Program.load("kernels/batch_norm_grad.cu")
_ROOM = read_constant("normed.cuh", "ROOM_BYTES")  # of a channel in shared memory
_HELD = read_constant("normed.cuh", "MOST_HELD")  # elements a thread has in registers
_FEW_CHANNELS = 64
_SHORT = 16 * THREADS  # elements of a channel that do not occupy more blocks


def fits(channels: Channels, nbytes: int) -> bool:
    """Return whether a channel fits a block, and enough blocks have work."""
    N, C, S = channels.shape
    most = min(_ROOM // nbytes, _HELD * THREADS)
    worth = C >= _FEW_CHANNELS or N * S <= _SHORT
    return channels.width == 1 and 0 < N * S <= most and worth


def _workspace(inputs: Specs, *_: object) -> int:
    """Return the bytes of partial sums; none if one launch does everything."""
    if fits(Channels.of(inputs[0].shape), itemsize(inputs[0].dtype)):
        return 0
    return 2 * Channels.most_bytes(inputs[0])


def batch_norm_grad(call: KernelCall) -> None:
    """Compute gamma inv_std (dy - mean(dy) - x̂ mean(dy x̂)), dgamma and dbeta."""
    x, dy, gamma, mean, inv_std = call.inputs
    _backward(call, (x, dy, None, gamma, None, mean, inv_std, None), call.outputs)


def batch_norm_eval(call: KernelCall) -> None:
    """Normalise by the running statistics."""
    x, gamma, *_ = call.inputs
    channels = Channels.here(call, x, *call.outputs)
    arguments = *call.inputs, *call.outputs, *channels.arguments, *call.numbers("eps")
    channels.launch(call, PROGRAM, "batch_norm_eval", *arguments, beside=gamma)


def batch_norm_relu_grad(call: KernelCall) -> None:
    """Run `batch_norm_grad` on dy masked to positive inputs of the ReLU."""
    x, dy, gamma, beta, mean, inv_std = call.inputs
    _backward(call, (x, dy, None, gamma, beta, mean, inv_std, None), call.outputs)


def batch_norm_add_relu_grad(call: KernelCall) -> None:
    """Compute the term's gradient, dy where y is not 0, and the others."""
    x, dy, y, gamma, mean, inv_std = call.inputs
    dterm, *others = call.outputs
    _backward(call, (x, dy, y, gamma, None, mean, inv_std, dterm), others)


def _forward(call: KernelCall, *, relu: bool) -> None:
    """Normalise by the batch's statistics, add a sixth input, if any, apply a ReLU.

    Updates the running statistics.
    """
    x, gamma, *_ = call.inputs
    operands = *(*call.inputs, None)[:6], *call.outputs
    rules = *call.numbers("eps", "momentum"), int(call.attrs["update"])
    numbers = *rules, int(relu)
    channels = Channels.here(call, x, operands[5], call.outputs[0])
    if channels.apiece > 1:
        _, _, beta, *running, term, y, mean, inv_std = operands
        sums = x, *channels.buffers(call.workspace, 2), *channels.arrived(call)
        arguments = *sums, *running, mean, inv_std, *channels.arguments, *rules
        blocks, name = channels.blocks, "batch_norm_statistics"
        call.launch(PROGRAM, name, blocks, *arguments, beside=gamma)
        apply_last(call, channels, (x, gamma, beta, mean, inv_std, term, y), relu=relu)
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


def apply_last(
    call: KernelCall, channels: Channels, operands: Sequence[Any], *, relu: bool
) -> None:
    """Normalise with channels last, and apply a ReLU if asked.

    `operands` are x, gamma, beta, mean, 1 / standard deviation, a term or None, and y.
    """
    arguments = *operands, *channels.arguments, int(relu)
    channels.launch(call, PROGRAM, "batch_norm", *arguments, beside=operands[1])


def _backward(
    call: KernelCall, operands: tuple[Any, ...], results: Sequence[Any]
) -> None:
    """Compute the gradients of a batch normalisation and an optional ReLU.

    `operands` are x, dy, the ReLU's result, gamma, beta, mean, 1 / standard deviation
    and the term's gradient; missing ones are None. The mask comes from the result if
    given, or from x if beta is given. `results` are dx, dgamma and dbeta.
    """
    x, dy, y, gamma, _, mean, inv_std, dterm = operands
    channels = Channels.here(call, x, dy, y, dterm, results[0])
    if fits(channels, x.dtype.itemsize):
        arguments = *operands, *results, *channels.shape
        blocks, name = (channels.shape[1], 1), "batch_norm_grad_whole"
        call.launch(GRADIENT, name, blocks, *arguments, beside=mean)
        return
    parts = channels.buffers(call.workspace, 2)
    partial_sums(call, channels, operands, parts)
    if y is not None:  # dterm now holds the masked gradient
        operands = x, dterm, None, gamma, None, mean, inv_std, None
    arguments = *operands, *results, *parts, channels.left, *channels.arguments
    channels.launch(call, GRADIENT, "batch_norm_grad", *arguments, beside=mean)


def partial_sums(
    call: KernelCall, channels: Channels, operands: Sequence[Any], parts: Sequence[Any]
) -> None:
    """Sum gradients, and gradients times deviations, in `channels.left` parts."""
    sums = *parts, *channels.arrived(call)
    arguments = *operands, *sums, *channels.arguments
    channels.launch(call, GRADIENT, "channel_dots", *arguments, beside=operands[5])


OPERATIONS: dict[str, Operation] = {
    "batch_norm": Operation(partial(_forward, relu=False), _workspace),
    "batch_norm_eval": Operation(batch_norm_eval),
    "batch_norm_grad": Operation(batch_norm_grad, _workspace),
    "batch_norm_relu": Operation(partial(_forward, relu=True), _workspace),
    "batch_norm_relu_grad": Operation(batch_norm_relu_grad, _workspace),
    "batch_norm_add_relu": Operation(partial(_forward, relu=True), _workspace),
    "batch_norm_add_relu_grad": Operation(batch_norm_add_relu_grad, _workspace),
}
