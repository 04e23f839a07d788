"""What overflows becomes an infinity, without a word, whatever computes it."""

import numpy as np
import pytest

from mucudnn.backends import get_backend
from mucudnn.ir.conv import Direction
from tests.conv_problems import conv_problem

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
