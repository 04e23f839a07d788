"""Batch normalisation with a sum and a ReLU behind it: its launches, and no more."""

from mucudnn.backends.cuda.kernels.batch_norm import forward
from mucudnn.backends.cuda.kernels.batch_norm_grad import backward
from mucudnn.backends.cuda.kernels.normed import workspace
from mucudnn.backends.cuda.kernels.program import KernelCall, Operation

__all__ = ["OPERATIONS"]


def batch_norm_relu(call: KernelCall) -> None:
    """max(normalised, 0), or max(normalised + term, 0); moves the statistics."""
    forward(call, relu=True)


def batch_norm_relu_grad(call: KernelCall) -> None:
    """As `batch_norm_grad` of the gradient where the ReLU's input is not negative."""
    x, dy, gamma, beta, mean, inv_std = call.inputs
    backward(call, (x, dy, None, gamma, beta, mean, inv_std, None), call.outputs)


def batch_norm_add_relu_grad(call: KernelCall) -> None:
    """The gradient where the result is not 0, which is the term's, and the others."""
    x, dy, y, gamma, mean, inv_std = call.inputs
    dterm, *others = call.outputs
    backward(call, (x, dy, y, gamma, None, mean, inv_std, dterm), others)


OPERATIONS: dict[str, Operation] = {
    "batch_norm_add_relu": Operation(batch_norm_relu, workspace),
    "batch_norm_add_relu_grad": Operation(batch_norm_add_relu_grad, workspace),
    "batch_norm_relu": Operation(batch_norm_relu, workspace),
    "batch_norm_relu_grad": Operation(batch_norm_relu_grad, workspace),
}
