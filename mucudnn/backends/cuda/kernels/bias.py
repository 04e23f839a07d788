"""One number a channel added, and its gradient: sums over everything but channels."""

from mucudnn.backends.cuda.kernels.program import KernelCall, Operation, Program, Specs
from mucudnn.backends.cuda.kernels.sums import CHANNELS, FINISH, Channels

__all__ = ["OPERATIONS", "PROGRAM"]

PROGRAM = Program(
    CHANNELS
    + FINISH
    + r"""
KERNEL bias(const T* x, const P* b, T* y, I N, I C, I S, I width, I relu) {
    Channel channel(N, C, S, width);
    if (channel.c >= C) return;
    A more = (A)b[channel.c];
    EACH_PACK(channel, aligned(x) && aligned(y), {
        Pack<T, W> v = load<W>(x + at.i);
        for (int j = 0; j < W; ++j) {
            A sum = (A)v.at[j] + more;
            v.at[j] = (T)(!relu || sum > 0 || sum != sum ? sum : (A)0);
        }
        store(y + at.i, v);
    })
}

KERNEL bias_relu_grad(const T* y, const T* dy, T* dx, double* parts, I N, I C, I S,
                      I width) {
    Channel channel(N, C, S, width);
    double sum = 0;
    EACH_PACK(channel, aligned(y) && aligned(dy) && aligned(dx), {
        Pack<T, W> result = load<W>(y + at.i), d = load<W>(dy + at.i);
        A part = 0;
        for (int j = 0; j < W; ++j) {
            if ((A)result.at[j] == 0) d.at[j] = (T)(A)0;
            part += (A)d.at[j];
        }
        store(dx + at.i, d);
        sum += (double)part;
    })
    channel.leave(parts, lane_sum(sum, width));
}

KERNEL bias_grad(const T* dy, double* parts, I N, I C, I S, I width) {
    Channel channel(N, C, S, width);
    double sum = 0;
    EACH_PACK(channel, aligned(dy), {
        Pack<T, W> d = load<W>(dy + at.i);
        A part = 0;
        for (int j = 0; j < W; ++j) part += (A)d.at[j];
        sum += (double)part;
    })
    channel.leave(parts, lane_sum(sum, width));
}
"""
)


def bias(call: KernelCall) -> None:
    """Y = x + b, b of shape (C,) along axis 1."""
    _added(call, relu=False)


def bias_relu(call: KernelCall) -> None:
    """max(x + b, 0)."""
    _added(call, relu=True)


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


def _added(call: KernelCall, *, relu: bool) -> None:
    x, b = call.inputs
    channels = Channels.of(x.shape)
    arguments = x, b, call.outputs[0], *channels.arguments, int(relu)
    call.launch(PROGRAM, "bias", channels.blocks, *arguments, beside=b)


def _one_sum(inputs: Specs, *_: object) -> int:
    return Channels.of(inputs[0].shape).nbytes


OPERATIONS: dict[str, Operation] = {
    "bias": Operation(bias),
    "bias_grad": Operation(bias_grad, _one_sum),
    "bias_relu": Operation(bias_relu),
    "bias_relu_grad": Operation(bias_relu_grad, _one_sum),
}
