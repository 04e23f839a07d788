"""Less memory than planned, or kernels that fail: the result is right all the same."""

import dataclasses
import logging
import re
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mucudnn.backends import Backend, get_backend
from mucudnn.errors import (
    BackendError,
    OutOfMemoryError,
    StepFailedError,
    UnsupportedError,
    VerificationError,
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


def test_an_arena_grows_shrinks_never_and_is_a_threads_own(monkeypatch):
    """It never holds two buffers, and keeps the one it has where none is larger."""
    device, given, alive = tight("cpu", most=100).device, [], []
    allocate = device.allocate

    def counting(nbytes):
        alive.append(sum(ref() is not None for ref in given))
        given.append(weakref.ref(buffer := allocate(nbytes)))
        return buffer

    monkeypatch.setattr(device, "allocate", counting)
    arena = Arena(device)
    for nbytes, expected in ((10, 10), (5, 10), (20, 20), (15, 20), (30, 30)):
        assert arena.get(nbytes).nbytes == expected
    assert alive == [0, 0, 0]
    with pytest.raises(OutOfMemoryError):
        arena.get(200)
    assert arena.get(30).nbytes == 30
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(arena.get, 1).result().nbytes == 1


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
def test_every_way_to_fail_is_survived_but_a_mistake_of_the_caller(error):
    whole = problem(4)
    backend = watched("cpu", Fails("GEMM", "IMPLICIT_GEMM", error=error))
    ready = Tuner(backend=backend).adopt(plan_of(backend, whole, ("GEMM", 4)))
    a, b = operands(whole)
    out = np.empty(whole.y_shape, np.float32)
    ready(a, b, out, False)
    assert relative_error(out, reference(whole, a, b)) < 1e-4
    with pytest.raises(ValueError, match="out must be float32"):
        ready(a, b, out.astype(np.float64), False)


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


# --- verification ------------------------------------------------------------------


class Spoilt:
    """A runner whose result is multiplied at one place, from the nth run on."""

    def __init__(self, runner, at, factor, after):
        self.plan = runner.plan
        self._runner, self._at, self._factor = runner, at, factor
        self.left = after

    def run(self, a, b, out, workspace, accumulate):
        self._runner.run(a, b, out, workspace, accumulate)
        self.left -= 1
        if self.left < 0:
            out[self._at] *= self._factor


def spoilt(at=(0, 0, 0, 0), factor=1.0, after=0):
    """The CPU with `Spoilt` plans and watched kernels."""
    backend = watched("cpu")
    plain = Backend("cpu", backend.device, get_backend("cpu").conv)
    return dataclasses.replace(
        backend, binder=lambda plan, replay: Spoilt(plain.bind(plan), at, factor, after)
    )


def verified(backend, whole, verify, *parts):
    tuner = Tuner(backend=backend, cache=None, verify=verify)
    return tuner.adopt(plan_of(backend, whole, *parts))


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("dtype", "layout"), [("float32", "NCHW"), ("float64", "NHWC")]
)
@pytest.mark.parametrize("factor", [1.0, 1 - 1e-2, np.nan])
def test_a_wrong_result_of_a_divided_plan_is_told(
    direction, accumulate, dtype, layout, factor
):
    """Of every algorithm what rounding does is within the tolerance."""
    whole = problem(5, direction, padding=1, dtype=dtype, layout=layout)
    a, b = operands(whole)
    expected = reference(whole, a, b)
    at = tuple(map(int, np.unravel_index(np.abs(expected).argmax(), expected.shape)))
    for algo, _ in get_backend("cpu").conv.algorithms(whole):
        backend = spoilt(at, factor)
        ready = verified(backend, whole, 1, (algo, 2), (algo, 3))
        out = np.zeros(expected.shape, dtype) if accumulate else None
        if factor == 1:
            out = ready(a, b, out, accumulate)
            assert relative_error(out, expected) < 1e-4
            continue
        with pytest.raises(VerificationError) as caught:
            ready(a, b, out, accumulate)
        message = str(caught.value)
        for part in (str(whole), repr(ready.plan), f"at {at}: ", "IMPLICIT_GEMM"):
            assert part in message
        told = float(re.search(r"by (\S+) of the results' magnitude", message)[1])
        assert told == np.inf if np.isnan(factor) else 1e-3 < told <= 0.0101


def test_the_first_run_and_every_nth_is_verified():
    whole = problem(4)
    backend = spoilt()
    ready = verified(backend, whole, 3, ("GEMM", 2), ("GEMM", 2))
    a, b = operands(whole)
    counts = []
    for _ in range(7):
        ready(a, b)
        counts.append(len(backend.conv.calls))
    assert counts == [1, 1, 1, 2, 2, 2, 3]
    ready.use(plan_of(backend, whole, ("GEMM", 1), ("GEMM", 3)))
    ready(a, b)
    assert len(backend.conv.calls) == 4
    ready.use(plan_of(backend, whole, ("GEMM", 4)))  # not divided
    ready(a, b)
    assert len(backend.conv.calls) == 4


@pytest.mark.parametrize("verify", [None, 0])
def test_nothing_is_verified_unless_asked(verify):
    backend = spoilt(factor=5.0)
    ready = verified(backend, problem(4), verify, ("GEMM", 2), ("GEMM", 2))
    ready(*operands(problem(4)))
    assert backend.conv.calls == []


def test_after_a_wrong_result_the_next_run_is_verified_too():
    ready = verified(
        spoilt(factor=2.0, after=5), problem(4), 5, ("GEMM", 2), ("GEMM", 2)
    )
    a, b = operands(problem(4))
    for _ in range(5):
        ready(a, b)
    for _ in range(3):
        with pytest.raises(VerificationError):
            ready(a, b)


@pytest.mark.parametrize("direction", Direction)
def test_rounding_and_overflow_are_no_wrong_results(direction):
    """Sums that cancel, samples of other magnitudes, infinities and zeros."""
    whole = problem(4, direction, padding=1)
    ones, zeros = (
        [np.full(s.shape, v, np.float32) for s in whole.operands()[:2]] for v in (1, 0)
    )
    ones[1].reshape(-1)[::2] = -1
    for a, b in (ones, zeros, operands(whole)):
        for scale in (1.0, np.float32(1e-30), np.float32(1e30), np.inf):
            scaled = a.copy()
            scaled[1] = 0
            with np.errstate(invalid="ignore"):
                scaled[2] *= scale
            for algo in ("GEMM", "FFT", "WINOGRAD_NONFUSED"):
                ready = verified(
                    get_backend("cpu"), whole, 1, (algo, 2), ("IMPLICIT_GEMM", 2)
                )
                with np.errstate(all="ignore"):
                    found = ready(scaled, b)
                assert found.shape == whole.operands()[2].shape


@pytest.mark.parametrize(
    ("verify", "error", "message"),
    [
        (
            True,
            TypeError,
            "verify must be a number of runs, got True; 1 verifies every run",
        ),
        (False, TypeError, "got False"),
        ("1", TypeError, "verify must be an integer, got '1'"),
        (1.5, TypeError, "verify must be an integer"),
        (float("nan"), TypeError, "verify must be an integer"),
        (-1, ValueError, "verify must be at least 0, got -1"),
    ],
)
def test_what_is_no_number_of_runs_is_refused(verify, error, message):
    for make in (Tuner, Tuner.from_env):
        with pytest.raises(error, match=message):
            make(backend="null", cache=None, verify=verify)


def test_run_plan_refuses_arrays_that_overlap():
    backend, whole = get_backend("cpu"), problem(4, padding=1)
    plan = plan_of(backend, whole, ("GEMM", 4))
    a, b = operands(whole)
    memory = np.zeros(1 << 16, np.uint8)
    out = memory[:5184].view(np.float32).reshape(4, 4, 9, 9)
    inside = memory[5180:][: b.nbytes].view(np.float32).reshape(b.shape)
    workspace = np.zeros(plan.workspace, np.uint8)
    for arrays_, name in (((out[:, :3], b), "a"), ((a, inside), "b")):
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            run_plan(backend, plan, *arrays_, out, workspace)
    with pytest.raises(ValueError, match="out shares memory with workspace"):
        run_plan(backend, plan, a, b, out, memory)
    run_plan(backend, plan, a, b, out, workspace)
    assert relative_error(out, reference(whole, a, b)) < 1e-4
