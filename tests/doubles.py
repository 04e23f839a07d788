"""Backends that misbehave on purpose, around a real one."""

from mucudnn.backends import Backend, get_backend
from mucudnn.backends.null import NullArray
from mucudnn.errors import OutOfMemoryError
from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem, Direction
from mucudnn.runtime.timing import StoppingRule

QUICK = StoppingRule(min_samples=1, max_samples=1)


class Watched:
    """A library whose kernels are announced to `before`, which may raise."""

    def __init__(self, conv, before):
        self._conv = conv
        self._before = before
        self.calls = []
        self.algorithms = conv.algorithms
        self.excluded = conv.excluded

    def run(self, problem, algo, *operands, **options):
        self.calls.append((algo, problem.batch))
        self._before(problem, algo)
        self._conv.run(problem, algo, *operands, **options)


class Tight:
    """A device that cannot give out more than `most` bytes at once."""

    def __init__(self, device, most):
        self._device = device
        self.most = most

    def __getattr__(self, name):
        return getattr(self._device, name)

    def allocate(self, nbytes):
        if nbytes > self.most:
            raise OutOfMemoryError(f"no room for {nbytes} bytes")
        return self._device.allocate(nbytes)


def watched(name="null", before=lambda problem, algo: None):
    """A backend and the list of its kernel calls, (algorithm, samples)."""
    real = get_backend(name)
    return Backend(real.name, real.device, Watched(real.conv, before))


def tight(name, most):
    real = get_backend(name)
    return Backend(real.name, Tight(real.device, most), real.conv)


def problem(batch=8, direction=Direction.FORWARD, **options):
    shapes = {"x_shape": (batch, 3, 9, 9), "w_shape": (4, 3, 3, 3)}
    return ConvProblem(direction=direction, **{**shapes, **options})


def arrays(problem):
    """Null operands: the two inputs and the output."""
    return tuple(NullArray(s.shape, s.dtype) for s in problem.operands())


def plan_of(backend, problem, *steps):
    """A plan by hand, of (algorithm, samples) pairs."""
    perfs = []
    for algo, batch in steps:
        nbytes = dict(backend.conv.algorithms(problem.with_batch(batch)))[algo]
        perfs.append(AlgoPerf(algo=algo, batch=batch, time_ms=1.0, workspace=nbytes))
    return ConvPlan(problem, tuple(perfs))
