"""Backends that misbehave on purpose, around a real one."""

import contextlib
import gc
import sqlite3
from contextlib import contextmanager

from mucudnn.backends import Backend, get_backend
from mucudnn.backends.virtual import VirtualArray
from mucudnn.errors import OutOfMemoryError
from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem, Direction
from mucudnn.ir.numerics import NATIVE, TF32, Traits
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner

QUICK = StoppingRule(min_samples=1, max_samples=1)


@contextmanager
def without_collection():
    """No collection of garbage within, and nothing left for one before."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Watched:
    """A library whose kernels are announced to `before`, which may raise."""

    def __init__(self, conv, before):
        self._conv = conv
        self._before = before
        self.calls = []
        self.algorithms = conv.algorithms
        self.excluded = conv.excluded
        self.traits = conv.traits

    def run(self, problem, algo, *operands, **options):
        self.calls.append((algo, problem.batch))
        self._before(problem, algo)
        self._conv.run(problem, algo, *operands, **options)


class Timer:
    """A device whose clock shows what its work says that it took, in `now`."""

    def __init__(self, device):
        self._device, self.now = device, 0.0

    def __getattr__(self, name):
        return getattr(self._device, name)

    def begin(self, launches=1):
        return self.now

    def record(self):
        return self.now

    def elapsed_ms(self, start, stop):
        return stop - start


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


def measuring(backend, cache, *, clock=None, workers=None, **options):
    """A tuner with a clock and workers of the test's own."""
    tuner = Tuner(backend=backend, cache=cache, **{"rule": QUICK, **options})
    tuner._clock, tuner._workers = clock or tuner._clock, workers
    return tuner


def problem(batch=8, direction=Direction.FORWARD, **options):
    shapes = {"x_shape": (batch, 3, 9, 9), "w_shape": (4, 3, 3, 3)}
    return ConvProblem(direction=direction, **{**shapes, **options})


def arrays(problem):
    """Null operands: the two inputs and the output."""
    return tuple(VirtualArray(s.shape, s.dtype) for s in problem.operands())


def plan_of(backend, problem, *steps):
    """A plan by hand, of (algorithm, samples) pairs."""
    perfs = []
    for algo, batch in steps:
        nbytes = dict(backend.conv.algorithms(problem.with_batch(batch)))[algo]
        perfs.append(AlgoPerf(algo=algo, batch=batch, time_ms=1.0, workspace=nbytes))
    return ConvPlan(problem, tuple(perfs))


class Crowded:
    """A library with many algorithms: `A0` is preferred and needs most workspace.

    Every third rounds to TF32, every fifth does not repeat its bits, every seventh
    cannot run.
    """

    def __init__(self, conv, many):
        self._conv = conv
        self._many = many

    def _names(self, runs):
        return [i for i in range(self._many) if (i % 7 != 6) == runs]

    def algorithms(self, problem):
        share = 1024 * problem.batch
        return [(f"A{i}", share * (self._many - i)) for i in self._names(True)]

    def excluded(self, problem):
        return [(f"A{i}", f"needs {i} banks") for i in self._names(False)]

    def traits(self, problem, algo):
        i = int(algo[1:])
        return Traits(
            deterministic=i % 5 != 4,
            math_mode=TF32 if i % 3 == 2 else NATIVE,
            notes=("tensor_core",) if i % 3 == 2 else (),
        )

    def run(self, problem, algo, a, b, out, workspace, *, accumulate=False):
        name = "FAST" if int(algo[1:]) % 2 else "SLOW"
        self._conv.run(problem, name, a, b, out, workspace, accumulate=accumulate)


def crowded(many=60):
    real = get_backend("null")
    return Backend("crowded", real.device, Crowded(real.conv, many))


def places_in(value, before=()):
    """Yield the way to every value in a JSON document, the document's own first."""
    yield before
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from places_in(inner, (*before, key))


def break_index(file):
    """Let the index of a cache's file contradict its table."""
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        (size,) = db.execute("PRAGMA page_size").fetchone()
        query = "SELECT rootpage FROM sqlite_master WHERE name LIKE 'sqlite_auto%'"
        (page,) = db.execute(query).fetchone()
        (key,) = db.execute("SELECT key FROM entries LIMIT 1").fetchone()
    raw = bytearray(file.read_bytes())
    at = raw.index(key.encode()[:20], (page - 1) * size)
    assert at < page * size
    raw[at] ^= 1
    file.write_bytes(raw)


def copied(copier, way, source, target, after=()):
    """Start a single copy; return its ticket."""
    return copier.prebind(way, source, target)(after)
