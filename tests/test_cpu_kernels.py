"""What all kernels of a training step share: a table, little memory, the same bits."""

import tracemalloc

from mucudnn.backends import get_backend
from mucudnn.backends.base import Kernel
from mucudnn.backends.cpu.kernels import KERNELS, bind
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.operations import OPERATIONS
from tests.kernel_cases import large_cases, run

WITH_A_KERNEL = OPERATIONS.keys() - {"conv", "reshape"}


def test_there_is_a_kernel_for_every_operation():
    assert set(KERNELS) == WITH_A_KERNEL
    kernels = get_backend("cpu").kernels
    assert set(kernels) == WITH_A_KERNEL
    assert all(isinstance(kernel, Kernel) for kernel in kernels.values())
    assert {k.workspace([], [], {}) for k in kernels.values()} == {0}


def test_memory_does_not_grow_with_the_tensors():
    """16 MiB each, less than 5 MiB beside them: 2 MiB a worker, and small things."""
    kernels, seen = bind(Workers(2)), set()
    for op, inputs, outputs, attrs in large_cases("f4", N=8):
        seen.add(op)
        tracemalloc.start()
        run(op, inputs, outputs, attrs, kernels)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 5 << 20, (op, peak)
    assert seen == WITH_A_KERNEL


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
