"""One number a channel added, and its gradient: sums over everything but channels."""

from mucudnn.backends.cuda.kernels.program import (
    KernelCall,
    Operation,
    Program,
    Specs,
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

KERNEL bias_relu(const T* x, const P* b, T* y, I count, I C, I S) {
    EACH(i, count) {
        A v = (A)x[i] + (A)b[i / S % C];
        y[i] = (T)(v > 0 || v != v ? v : (A)0);
    }
}

KERNEL bias_relu_grad(const T* y, const T* dy, T* dx, double* parts, I N, I C, I S,
                      I width) {
    Channel channel(N, C, S, width);
    double sum = 0;
    EACH_OF(channel, i) {
        A d = (A)y[i] != 0 ? (A)dy[i] : (A)0;
        dx[i] = (T)d;
        sum += (double)d;
    }
    channel.leave(parts, lane_sum(sum, width));
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
    _added(call, "bias")


def bias_relu(call: KernelCall) -> None:
    """max(x + b, 0)."""
    _added(call, "bias_relu")


def bias_relu_grad(call: KernelCall) -> None:
    """Dy where y is not 0, and its sum over samples and pixels."""
    (y, dy), (dx, db) = call.inputs, call.outputs
    channels = Channels.of(dy.shape)
    (parts,) = channels.buffers(call.workspace, 1)
    arguments = y, dy, dx, parts, *channels.arguments
    call.launch(PROGRAM, "bias_relu_grad", channels.blocks, *arguments)
    channels.finish(call, PROGRAM, parts, db)


def bias_grad(call: KernelCall) -> None:
    """The sum of dy over samples and pixels."""
    dy, db = call.inputs[0], call.outputs[0]
    channels = Channels.of(dy.shape)
    (parts,) = channels.buffers(call.workspace, 1)
    call.launch(PROGRAM, "bias_grad", channels.blocks, dy, parts, *channels.arguments)
    channels.finish(call, PROGRAM, parts, db)


def _added(call: KernelCall, kernel: str) -> None:
    x, b = call.inputs
    _, C, S = as_ncs(x.shape)
    arguments = x, b, call.outputs[0], x.size, C, S
    call.launch(PROGRAM, kernel, flat(x.size), *arguments, beside=b)


def _one_sum(inputs: Specs, *_: object) -> int:
    return Channels.of(inputs[0].shape).nbytes


OPERATIONS: dict[str, Operation] = {
    "bias": Operation(bias),
    "bias_grad": Operation(bias_grad, _one_sum),
    "bias_relu": Operation(bias_relu),
    "bias_relu_grad": Operation(bias_relu_grad, _one_sum),
}
