"""Per-channel bias, and its gradient: sums over everything but channels."""

from typing import Any

from mucudnn.backends.cuda.kernels.channels import Channels
from mucudnn.backends.cuda.kernels.program import KernelCall, Operation, Program, Specs
from mucudnn.backends.cuda.kernels.sums import CHANNELS, FINISH, LAST_BLOCK

__all__ = ["OPERATIONS", "PROGRAM"]

PROGRAM = Program(
    CHANNELS
    + FINISH
    + LAST_BLOCK
    + r"""
#define SHAPE I N, I C, I S, I width
template <int CH>
__device__ void added(const T* x, const P* b, T* y, I relu, SHAPE) {
    ChannelsOf<CH> channel(N, C, S, width);
    A more[CH];
    for (int j = 0; j < CH; ++j) more[j] = (A)b[channel.own() + j];
    EACH_PACK(channel, aligned(x) && aligned(y), (x), {
        Pack<T, W> v = found.of[0];
        for (int j = 0; j < W; ++j) {
            A sum = (A)v.at[j] + more[OF(j)];
            v.at[j] = (T)(!relu || sum > 0 || sum != sum ? sum : (A)0);
        }
        store(y + at.i, v);
    })
}

KERNEL bias(const T* x, const P* b, T* y, I relu, SHAPE) {
    added<1>(x, b, y, relu, N, C, S, width);
}

KERNEL bias_last(const T* x, const P* b, T* y, I relu, SHAPE) {
    added<PACKED>(x, b, y, relu, N, C, S, width);
}

// Sums dy; if y is given, only where y is not 0, and stores dx.
template <int CH>
__device__ void summed(const T* y, const T* dy, T* dx, double* parts, SHAPE) {
    ChannelsOf<CH> channel(N, C, S, width);
    Tally<CH> sums;
    EACH_PACK(channel, aligned(y) && aligned(dy) && aligned(dx), (dy, y), {
        Pack<T, W> d = found.of[0];
        for (int j = 0; j < W; ++j) {
            if (y && (A)found.of[1].at[j] == 0) d.at[j] = (T)(A)0;
            sums.add(j, (A)d.at[j]);
        }
        if (y) store(dx + at.i, d);
        sums.added();
    })
    leave_sums(channel, sums, parts, width);
}

KERNEL bias_relu_grad(const T* y, const T* dy, T* dx, double* parts, SHAPE) {
    summed<1>(y, dy, dx, parts, N, C, S, width);
}

// As `summed`; the last block adds the parts up.
__device__ void summed_last(const T* y, const T* dy, T* dx, P* db, double* parts,
                            long long* arrived, SHAPE) {
    summed<PACKED>(y, dy, dx, parts, N, C, S, width);
    if (!is_last(arrived)) return;
    Gathering<PACKED> all(C, width);
    double sum = all.sum(parts);
    if (all.leads()) db[all.c] = (P)sum;
}

KERNEL bias_relu_grad_last(const T* y, const T* dy, T* dx, P* db, double* parts,
                           long long* arrived, SHAPE) {
    summed_last(y, dy, dx, db, parts, arrived, N, C, S, width);
}

KERNEL bias_grad(const T* dy, double* parts, SHAPE) {
    summed<1>(0, dy, 0, parts, N, C, S, width);
}

KERNEL bias_grad_last(const T* dy, P* db, double* parts, long long* arrived, SHAPE) {
    summed_last(0, dy, 0, db, parts, arrived, N, C, S, width);
}
"""
)


def bias(call: KernelCall) -> None:
    """Compute y = x + b, b of shape (C,) along axis 1."""
    _added(call, relu=False)


def bias_relu(call: KernelCall) -> None:
    """Compute max(x + b, 0)."""
    _added(call, relu=True)


def bias_relu_grad(call: KernelCall) -> None:
    """Compute dy where y is not 0, and its sum over samples and pixels."""
    (y, dy), (dx, db) = call.inputs, call.outputs
    _summed(call, "bias_relu_grad", (y, dy, dx), db)


def bias_grad(call: KernelCall) -> None:
    """Sum dy over samples and pixels."""
    dy, db = call.inputs[0], call.outputs[0]
    _summed(call, "bias_grad", (dy,), db)


def _summed(call: KernelCall, name: str, images: tuple[Any, ...], db: Any) -> None:
    channels = Channels.here(call, *images)
    (parts,) = channels.buffers(call.workspace, 1)
    shape, blocks = channels.arguments, channels.blocks
    if channels.apiece == 1:
        call.launch(PROGRAM, name, blocks, *images, parts, *shape)
        channels.finish(call, PROGRAM, parts, db)
        return
    arguments = *images, db, parts, *channels.arrived(call), *shape
    call.launch(PROGRAM, f"{name}_last", blocks, *arguments, beside=db)


def _added(call: KernelCall, *, relu: bool) -> None:
    (x, b), (y,) = call.inputs, call.outputs
    channels = Channels.here(call, x, y)
    arguments = x, b, y, int(relu), *channels.arguments
    name = channels.kernel("bias")
    call.launch(PROGRAM, name, channels.blocks, *arguments, beside=b)


def _one_sum(inputs: Specs, *_: object) -> int:
    return Channels.most_bytes(inputs[0])


OPERATIONS: dict[str, Operation] = {
    "bias": Operation(bias),
    "bias_grad": Operation(bias_grad, _one_sum),
    "bias_relu": Operation(bias_relu),
    "bias_relu_grad": Operation(bias_relu_grad, _one_sum),
}
