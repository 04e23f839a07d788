"""Problems, operands and plans for tests over the fake library."""

from types import MappingProxyType

import numpy as np
import pytest

from mucudnn import Tuner
from mucudnn.ir.conv import ConvProblem, Direction
from tests.cuda_fake import FakeArray
from tests.doubles import QUICK, plan_of
from tests.reference import operands, reference, relative_error

EXECUTE = "cudnnBackendExecute"
LEGACY = MappingProxyType(
    {
        Direction.FORWARD: "IMPLICIT_PRECOMP_GEMM",
        Direction.BACKWARD_DATA: "ALGO_1[fma]",
        Direction.BACKWARD_FILTER: "ALGO_1",
    }
)
TOLERANCE = {"float16": 3e-3, "float32": 1e-6, "float64": 1e-12}


def layer(batch=8, direction=Direction.FORWARD, **options):
    """A sample is a multiple of 16 bytes in every data type."""
    shapes = {"x_shape": (batch, 4, 6, 4), "w_shape": (8, 4, 3, 3), "padding": 1}
    return ConvProblem(direction=direction, **{**shapes, **options})


class Work:
    """Operands of a problem on the fake device, and what should come out."""

    def __init__(self, backend, problem, offset=0):
        self.problem = problem
        a, b = operands(problem)
        self.a, self.b = FakeArray.of(a, offset), FakeArray.of(b)
        spec = problem.operands()[2]
        self.before = (
            np.random.default_rng(1).uniform(-1, 1, spec.shape).astype(spec.dtype)
        )
        self.out = FakeArray.of(self.before)
        self.result = reference(problem, a, b)
        self.workspace = backend.device.allocate(1 << 16)

    def run(self, runner, accumulate=False):
        self.out.host[...] = self.before
        runner.run(self.a, self.b, self.out, self.workspace, accumulate)

    def right(self, accumulate=False):
        expected = self.result + (self.before if accumulate else 0)
        error = relative_error(self.out.host, expected)
        return error < TOLERANCE[self.problem.dtype]


def mixed(backend, problem):
    """A plan of both libraries, of four micro-batches."""
    return plan_of(
        backend,
        problem,
        ("eng1_k5=0", 3),
        (LEGACY[problem.direction], 2),
        ("eng0", 1),
        ("eng2", 2),
    )


everywhere = pytest.mark.parametrize("direction", Direction)
layouts = pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
accumulating = pytest.mark.parametrize("accumulate", [False, True])


def tuner_of(backend, cache=None, **options):
    return Tuner(
        backend=backend, rule=QUICK, workspace_limit=4096, cache=cache, **options
    )
