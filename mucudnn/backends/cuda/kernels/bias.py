"""One number a channel added, and its gradient: sums over everything but channels."""

from collections.abc import Sequence
from typing import Any

from mucudnn.backends.cuda.kernels.program import (
    Attrs,
    Inputs,
    Launcher,
    Operation,
    Outputs,
    Program,
    as_ncs,
    flat,
)
from mucudnn.backends.cuda.kernels.sums import CHANNELS, FINISH, Channels
from mucudnn.ir.tensor import TensorSpec

__all__ = ["OPERATIONS", "PROGRAM", "bias", "bias_grad"]

PROGRAM = Program(
    CHANNELS
    + FINISH
    + r"""
KERNEL bias(const T* x, const T* b, T* y, I count, I C, I S) {
    EACH(i, count) y[i] = (T)((A)x[i] + (A)b[i / S % C]);
}

KERNEL bias_grad(const T* dy, double* parts, I N, I C, I S, I width) {
    Channel channel(N, C, S, width);
    double sum = 0;
    EACH_OF(channel, i) sum += (double)dy[i];
    channel.leave(parts, lane_sum(sum, width));
}
"""
)


def bias(
    gpu: Launcher, inputs: Inputs, outputs: Outputs, attrs: Attrs, workspace: Any
) -> None:
    """Y = x + b, b of shape (C,) along axis 1."""
    x, b = inputs
    _, C, S = as_ncs(x.shape)
    gpu.launch(PROGRAM, "bias", flat(x.size), x, b, outputs[0], x.size, C, S)


def bias_grad(
    gpu: Launcher, inputs: Inputs, outputs: Outputs, attrs: Attrs, workspace: Any
) -> None:
    """The sum of dy over samples and pixels."""
    dy, db = inputs[0], outputs[0]
    channels = Channels.of(dy.shape)
    (parts,) = channels.buffers(workspace, 1)
    gpu.launch(PROGRAM, "bias_grad", channels.blocks, dy, parts, *channels.arguments)
    gpu.launch(
        PROGRAM, "finish_channels", flat(db.size), db, parts, channels.parts, db.size
    )


def _workspace(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs
) -> int:
    return Channels.of(inputs[0].shape).nbytes


OPERATIONS: dict[str, Operation] = {
    "bias": Operation(bias),
    "bias_grad": Operation(bias_grad, _workspace),
}
