"""What all kernels of a training step share: a table, little memory, the same bits."""

import tracemalloc

import numpy as np
import pytest

from mucudnn.backends import get_backend
from mucudnn.backends.base import Kernel
from mucudnn.backends.cpu import threads
from mucudnn.backends.cpu.conv import CpuConv
from mucudnn.backends.cpu.kernels import KERNELS, bind
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.operations import OPERATIONS
from tests.conv_problems import conv_problem
from tests.guarded import run_guarded
from tests.kernel_cases import large_cases, run
from tests.reference import operands, reference, relative_error
from tests.test_cpu_conv import CASES, EVERY_WAY

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
    for count in (1, 3):
        kernels = bind(Workers(count))
        bits = {}
        for op, inputs, outputs, attrs in large_cases("f4", N=3):
            run(op, inputs, outputs, attrs, kernels)
            arrays = outputs or inputs
            bits[op] = [hash(array.tobytes()) for array in arrays]
        written.append(bits)
    assert written[0] == written[1]


# What overflows becomes an infinity, without a word, whatever computes it.


OPERANDS = {
    Direction.FORWARD: ("x_shape", "w_shape", "y_shape"),
    Direction.BACKWARD_DATA: ("y_shape", "w_shape", "x_shape"),
    Direction.BACKWARD_FILTER: ("x_shape", "y_shape", "w_shape"),
}
LARGE = {"float32": 3e38, "float64": 1.5e308}


@pytest.mark.parametrize("dtype", LARGE)
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("spatial", [(9,), (8, 8), (5, 5, 5)], ids=len)
def test_convolutions_do_not_warn_of_what_overflows(spatial, direction, dtype):
    rng = np.random.default_rng(7)
    one = (1,) * len(spatial)
    problem = conv_problem(
        (9, 3, *spatial),
        (6, 3, *(3,) * len(spatial)),
        direction,
        stride=one,
        padding=one,
        dtype=dtype,
    )
    a, b, out = (
        rng.uniform(0.5, 1, getattr(problem, name)).astype(dtype)
        for name in OPERANDS[direction]
    )
    backend = get_backend("cpu")
    for algo, nbytes in backend.conv.algorithms(problem):
        workspace = backend.device.allocate(nbytes)
        for large in ((a * LARGE[dtype], b), (a, b * LARGE[dtype])):
            backend.conv.run(problem, algo, *large, out, workspace)
            assert not np.isfinite(out).all(), algo


@pytest.mark.parametrize("op", ["add", "add_relu", "multiply"])
def test_kernels_of_a_step_do_not_warn_of_what_overflows(op):
    largest = np.full((4, 8, 6, 6), np.finfo(np.float32).max)
    out = np.empty_like(largest)
    get_backend("cpu").kernels[op].run((largest, largest), (out,), {}, None)
    assert np.isinf(out).all()


# Products added in place by the BLAS that NumPy brings, and the way without it.


def inside(shape, dtype, by_column):
    """A matrix that is part of a larger one, and the larger one."""
    rows, columns = reversed(shape) if by_column else shape
    whole = np.random.default_rng(rows).integers(-9, 9, (rows + 2, columns + 3))
    whole = whole.astype(dtype)
    part = whole[1 : 1 + rows, 2 : 2 + columns]
    return (part.T if by_column else part), whole


def address(matrix):
    return matrix.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("orders", range(8))
@pytest.mark.parametrize("sizes", [(4, 5, 6), (1, 5, 6), (4, 1, 6), (4, 5, 1)])
def test_a_product_is_added_to_part_of_a_matrix(dtype, orders, sizes):
    m, k, n = sizes
    a, _ = inside((m, k), dtype, orders & 1)
    b, _ = inside((k, n), dtype, orders & 2)
    c, whole = inside((m, n), dtype, orders & 4)
    before, around = c.copy(), whole.copy()
    multiply = threads.product(a, b, c)
    if multiply is None:
        pytest.skip("NumPy has no OpenBLAS here")
    multiply(address(a), address(b), address(c), 1.0)
    np.testing.assert_array_equal(c, before + a @ b)
    multiply(address(a), address(b), address(c), 0.0)
    np.testing.assert_array_equal(c, a @ b)
    c[...] = before
    np.testing.assert_array_equal(whole, around)


@pytest.fixture
def without_blas(monkeypatch):
    monkeypatch.setattr(threads, "_gemm", lambda dtype: None)
    return CpuConv(Workers(2))


@pytest.mark.parametrize(("direction", "layout"), EVERY_WAY)
@pytest.mark.parametrize(
    "case", ["padded", "stride", "one_by_one", "groups", "depthwise", "long_reduction"]
)
def test_convolutions_need_no_blas_of_that_kind(without_blas, case, direction, layout):
    problem = ConvProblem(direction=direction, layout=layout, **CASES[case])
    a, b = operands(problem)
    expected = reference(problem, a, b)
    out = run_guarded(without_blas, problem, "IMPLICIT_GEMM", a, b)
    assert relative_error(out, expected) <= 2e-5
    before = np.ones(expected.shape, problem.dtype)
    out = run_guarded(without_blas, problem, "IMPLICIT_GEMM", a, b, before)
    assert relative_error(out, 1 + expected) <= 2e-5
