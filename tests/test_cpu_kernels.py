"""What all kernels of a training step share: a table, little memory, the same bits."""

import tracemalloc

from mucudnn.backends import get_backend
from mucudnn.backends.base import Kernel
from mucudnn.backends.cpu.kernels import KERNELS, bind
from mucudnn.backends.cpu.threads import Workers
from tests.kernel_cases import large_cases, run

OPERATIONS = {
    "accumulate",
    "accuracy",
    "adagrad",
    "adam",
    "adjust_loss_scale",
    "add",
    "add_relu",
    "avg_pool",
    "avg_pool_grad",
    "batch_norm",
    "batch_norm_add_relu",
    "batch_norm_add_relu_grad",
    "batch_norm_apply",
    "batch_norm_eval",
    "batch_norm_grad",
    "batch_norm_grad_apply",
    "batch_norm_grad_sums",
    "batch_norm_merge",
    "batch_norm_relu",
    "batch_norm_relu_grad",
    "batch_norm_sums",
    "bias",
    "bias_grad",
    "bias_relu",
    "bias_relu_grad",
    "cast",
    "concat",
    "dropout",
    "fill",
    "find_overflow",
    "gelu",
    "gelu_grad",
    "group_norm",
    "group_norm_apply",
    "group_norm_grad",
    "group_norm_grad_apply",
    "group_norm_grad_sums",
    "group_norm_merge",
    "group_norm_sums",
    "identity",
    "leaky_relu",
    "leaky_relu_grad",
    "lrn",
    "lrn_grad",
    "matmul",
    "max_pool",
    "max_pool_grad",
    "mean_squared_error",
    "mean_squared_error_grad",
    "momentum",
    "multiply",
    "pad",
    "relu",
    "relu_grad",
    "rmsprop",
    "scale",
    "sgd",
    "sigmoid",
    "sigmoid_grad",
    "slice",
    "softmax_cross_entropy",
    "softmax_cross_entropy_grad",
    "tanh",
    "tanh_grad",
    "to_channels_first",
    "to_channels_last",
    "upsample_bilinear",
    "upsample_bilinear_grad",
    "upsample_nearest",
    "upsample_nearest_grad",
}


def test_there_is_a_kernel_for_every_operation():
    assert set(KERNELS) == OPERATIONS
    kernels = get_backend("cpu").kernels
    assert set(kernels) == OPERATIONS
    assert all(isinstance(kernel, Kernel) for kernel in kernels.values())
    assert {k.workspace([], [], {}) for k in kernels.values()} == {0}


def test_memory_does_not_grow_with_the_tensors():
    """32 MiB each, less than 5 MiB beside them: 2 MiB a worker, and small things."""
    kernels, seen = bind(Workers(2)), set()
    for op, inputs, outputs, attrs in large_cases("f4"):
        seen.add(op)
        tracemalloc.start()
        run(op, inputs, outputs, attrs, kernels)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 5 << 20, (op, peak)
    assert seen == OPERATIONS


def test_workers_do_not_change_a_bit():
    written = []
    for threads in (1, 3):
        kernels = bind(Workers(threads))
        bits = {}
        for op, inputs, outputs, attrs in large_cases("f4", N=3):
            run(op, inputs, outputs, attrs, kernels)
            arrays = outputs or inputs
            bits[op] = [hash(array.tobytes()) for array in arrays]
        written.append(bits)
    assert written[0] == written[1]
