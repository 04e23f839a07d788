"""Less memory than planned, or kernels that fail: the result is right all the same."""

import logging
import threading
import weakref

import numpy as np
import pytest

from mucudnn.backends import get_backend
from mucudnn.errors import (
    BackendError,
    OutOfMemoryError,
    StepFailedError,
    UnsupportedError,
)
from mucudnn.ir.conv import Direction
from mucudnn.runtime.tuning.bound_plan import Arena, run_plan
from mucudnn.runtime.tuning.tuner import Tuner
from tests.doubles import QUICK, arrays, plan_of, problem, tight, watched
from tests.reference import operands, reference, relative_error

KIB = 1 << 10


def steps(plan):
    return [(step.algo, step.batch) for step in plan.steps]


# --- memory ------------------------------------------------------------------------


def short_of_memory(most, batch=8):
    """A plan for 8 KiB on a device that has `most` left."""
    backend = tight("null", most=1 << 30)
    tuner = Tuner(backend=backend, rule=QUICK, cache=None, prune=False)
    ready = tuner.compiled(problem(batch))
    assert steps(ready.plan) == [("FAST", batch)]
    backend.device.most = most
    return ready, backend


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (8 * KIB, [("FAST", 8)]),
        (8 * KIB - 1, [("FAST", 4)] * 2),
        (3 * KIB, [("FAST", 2)] * 4),
        (KIB, [("FAST", 1)] * 8),
        (KIB - 1, [("SLOW", 8)]),
        (0, [("SLOW", 8)]),
    ],
)
def test_the_largest_plan_that_memory_has_room_for(most, expected, caplog):
    ready, _ = short_of_memory(most)
    ready(*arrays(problem()), False)
    assert steps(ready.plan) == expected
    fallbacks = [r for r in caplog.records if "falling back" in r.message]
    assert bool(fallbacks) == (most < 8 * KIB)
    assert all(r.levelno == logging.WARNING for r in fallbacks)


def test_later_calls_keep_the_smaller_plan(caplog):
    ready, backend = short_of_memory(3 * KIB)
    ready(*arrays(problem()), False)
    kept = ready.plan
    backend.device.most = 1 << 30
    caplog.clear()
    ready(*arrays(problem()), False)
    assert ready.plan is kept
    assert caplog.records == []


def test_no_room_at_all_is_the_error_of_the_device():
    ready, _ = short_of_memory(-1)
    with pytest.raises(OutOfMemoryError, match="no room for 0 bytes"):
        ready(*arrays(problem()), False)


def test_an_arena_grows_shrinks_never_and_is_a_threads_own():
    arena = Arena(get_backend("null").device)
    small = arena.get(10)
    assert arena.get(5) is small
    large = arena.get(20)
    assert large.nbytes == 20
    assert arena.get(15) is large
    others = []
    thread = threading.Thread(target=lambda: others.append(arena.get(1)))
    thread.start()
    thread.join()
    assert others[0].nbytes == 1


def test_an_arena_survives_a_failure():
    backend = tight("null", most=100)
    arena = Arena(backend.device)
    arena.get(50)
    with pytest.raises(OutOfMemoryError):
        arena.get(200)
    assert arena.get(50).nbytes == 50


# --- kernels -----------------------------------------------------------------------


class Fails:
    """Every kernel of these algorithms fails, from the nth call of one on."""

    def __init__(self, *algos, after=0, error=BackendError):
        self._algos = algos
        self._left = after
        self._error = error

    def __call__(self, problem, algo):
        if algo not in self._algos:
            return
        if self._left == 0:
            raise self._error(f"{algo} cannot")
        self._left -= 1


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_the_rest_is_finished_by_another(direction, accumulate, after, layout, caplog):
    whole = problem(7, direction, padding=1, layout=layout)
    backend = watched("cpu", Fails("GEMM", after=after))
    ready = Tuner(backend=backend).adopt(
        plan_of(backend, whole, ("GEMM", 3), ("GEMM", 2), ("GEMM", 2))
    )
    a, b = operands(whole)
    spec = whole.operands()[2]
    out = np.random.default_rng(1).uniform(-1, 1, spec.shape).astype(spec.dtype)
    expected = reference(whole, a, b) + (out if accumulate else 0)
    ready(a, b, out, accumulate)
    assert relative_error(out, expected) < 1e-4
    done = (0, 3, 5)[after]
    assert f"GEMM failed after {done} samples" in caplog.text
    algo, batch = backend.conv.calls[-1]
    assert algo != "GEMM"
    assert batch == 7 - done


@pytest.mark.parametrize("error", [UnsupportedError, OutOfMemoryError, MemoryError])
def test_every_way_to_fail_is_survived(error):
    whole = problem(4)
    backend = watched("cpu", Fails("GEMM", "IMPLICIT_GEMM", error=error))
    ready = Tuner(backend=backend).adopt(plan_of(backend, whole, ("GEMM", 4)))
    a, b = operands(whole)
    out = np.empty(whole.y_shape, np.float32)
    ready(a, b, out, False)
    assert relative_error(out, reference(whole, a, b)) < 1e-4


def test_where_all_fail_the_first_failure_is_raised(caplog):
    backend = watched(before=Fails("FAST", "SLOW"))
    ready = Tuner(backend=backend).adopt(
        plan_of(backend, problem(), ("FAST", 4), ("SLOW", 4))
    )
    with pytest.raises(StepFailedError, match="FAST failed after 0 samples") as caught:
        ready(*arrays(problem()), False)
    assert isinstance(caught.value.__cause__, BackendError)
    assert caught.value.done == 0
    assert "SLOW failed too" in caplog.text


def test_mistakes_of_the_caller_are_not_recovered_from():
    whole = problem(4)
    backend = watched("cpu")
    ready = Tuner(backend=backend).adopt(plan_of(backend, whole, ("GEMM", 4)))
    a, b = operands(whole)
    with pytest.raises(ValueError, match="out must be float32"):
        ready(a, b, np.empty(whole.y_shape, np.float64), False)


def test_a_failed_step_tells_how_far_it_came():
    backend = watched(before=Fails("SLOW"))
    plan = plan_of(backend, problem(), ("FAST", 5), ("SLOW", 3))
    workspace = backend.device.allocate(plan.workspace)
    for run in (
        lambda: run_plan(backend, plan, *arrays(problem()), workspace),
        lambda: backend.bind(plan).run(*arrays(problem()), workspace, False),
    ):
        with pytest.raises(StepFailedError) as caught:
            run()
        assert (caught.value.algo, caught.value.done) == ("SLOW", 5)


def test_a_fallback_computes_the_same(caplog):
    """Real memory runs short after planning; the numbers are still right."""
    whole = problem(6, padding=1)
    backend = tight("cpu", most=1 << 30)
    tuner = Tuner(backend=backend, rule=QUICK, cache=None, prune=False)
    table = tuner.measure(whole)
    hungry = max(table.usable, key=lambda perf: perf.workspace)
    assert hungry.batch == 6
    ready = tuner.adopt(plan_of(backend, whole, (hungry.algo, 6)))
    a, b = operands(whole)
    out = np.empty(whole.y_shape, np.float32)
    backend.device.most = hungry.workspace - 1
    ready(a, b, out, False)
    assert relative_error(out, reference(whole, a, b)) < 1e-4
    assert ready.plan.workspace < hungry.workspace
    assert "falling back" in caplog.text


def test_a_growing_arena_never_holds_two_buffers():
    alive = []

    class Counting:
        def allocate(self, nbytes):
            alive.append(sum(ref() is not None for ref in given))
            buffer = np.empty(nbytes, np.uint8)
            given.append(weakref.ref(buffer))
            return buffer

        def queue(self):
            return threading.current_thread()

    given = []
    arena = Arena(Counting())
    for nbytes in (10, 20, 30):
        arena.get(nbytes)
    assert alive == [0, 0, 0]
