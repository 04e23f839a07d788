"""Batch normalisation fused with a sum and a ReLU, by the kernels of `batch_norm`."""

from mucudnn.backends.cuda.kernels.batch_norm import forward
from mucudnn.backends.cuda.kernels.batch_norm_grad import backward
from mucudnn.backends.cuda.kernels.normed import workspace
from mucudnn.backends.cuda.kernels.program import KernelCall, Operation

__all__ = ["OPERATIONS"]


def batch_norm_relu(call: KernelCall) -> None:
    """Compute max(normalised [+ term], 0); update the running statistics."""
    forward(call, relu=True)


def batch_norm_relu_grad(call: KernelCall) -> None:
    """Run `batch_norm_grad` on dy masked to positive inputs of the ReLU."""
    x, dy, gamma, beta, mean, inv_std = call.inputs
    backward(call, (x, dy, None, gamma, beta, mean, inv_std, None), call.outputs)


def batch_norm_add_relu_grad(call: KernelCall) -> None:
    """Compute the term's gradient, dy where y is not 0, and the others."""
    x, dy, y, gamma, mean, inv_std = call.inputs
    dterm, *others = call.outputs
    backward(call, (x, dy, y, gamma, None, mean, inv_std, dterm), others)


OPERATIONS: dict[str, Operation] = {
    "batch_norm_add_relu": Operation(batch_norm_relu, workspace),
    "batch_norm_add_relu_grad": Operation(batch_norm_add_relu_grad, workspace),
    "batch_norm_relu": Operation(batch_norm_relu, workspace),
    "batch_norm_relu_grad": Operation(batch_norm_relu_grad, workspace),
}
