"""One number a channel added, and its gradient: sums over everything but channels."""

from mucudnn.backends.cuda.kernels.program import (
    KernelCall,
    Operation,
    Program,
    as_ncs,
    flat,
)
from mucudnn.backends.cuda.kernels.sums import CHANNELS, FINISH, Channels

__all__ = ["OPERATIONS", "PROGRAM"]

PROGRAM = Program(
    CHANNELS
    + FINISH
    + r"""
KERNEL bias(const T* x, const P* b, T* y, I count, I C, I S) {
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


def bias(call: KernelCall) -> None:
    """Y = x + b, b of shape (C,) along axis 1."""
    x, b = call.inputs
    _, C, S = as_ncs(x.shape)
    arguments = x, b, call.outputs[0], x.size, C, S
    call.launch(PROGRAM, "bias", flat(x.size), *arguments, beside=b)


def bias_grad(call: KernelCall) -> None:
    """The sum of dy over samples and pixels."""
    dy, db = call.inputs[0], call.outputs[0]
    channels = Channels.of(dy.shape)
    (parts,) = channels.buffers(call.workspace, 1)
    call.launch(PROGRAM, "bias_grad", channels.blocks, dy, parts, *channels.arguments)
    channels.finish(call, PROGRAM, parts, db)


OPERATIONS: dict[str, Operation] = {
    "bias": Operation(bias),
    "bias_grad": Operation(bias_grad, lambda x, *_: Channels.of(x[0].shape).nbytes),
}
