"""Products added in place by the BLAS that NumPy brings, and the way without it."""

import numpy as np
import pytest

from mucudnn.backends.cpu import threads
from mucudnn.backends.cpu.conv import CpuConv
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem
from tests.guarded import run_guarded
from tests.reference import operands, reference, relative_error
from tests.test_cpu_conv import CASES, EVERY_WAY


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
