"""Measuring by the workers of an executor: the same rows, whoever is lost."""

import multiprocessing
import os
import pickle
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor

import pytest

from mucudnn.backends import get_backend
from mucudnn.errors import BackendUnavailableError
from mucudnn.ir.conv import Direction
from mucudnn.ir.numerics import RowStatus
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning import workers as worker
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.runtime.tuning.workers import Workers, process_pool
from mucudnn.suites import load_suite
from tests.commands import done
from tests.doubles import QUICK, measuring, problem
from tests.executors import VirtualWorkers, cost_ms, die_once, pretend_another_library
from tests.test_isolation import installed  # noqa: F401 (a fixture)

POLICIES = ("undivided", "powers_of_two", "all")


def tuner(**options):
    return Tuner(**{"backend": "null", "rule": QUICK, "cache": None, **options})


def keys(*tables):
    return {(t.problem, p.algo, p.batch) for t in tables for p in t.perfs}


def spawned(workers, initializer=None, *arguments):
    return ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=initializer,
        initargs=arguments,
    )


class Here(Executor):
    """Does at once what it is asked; `lose` says which task it loses, and how."""

    def __init__(self, lose=lambda nth: None):
        self.requests = []
        self._lose = lose

    def submit(self, fn, /, *args, **kwargs):
        (request,) = args
        self.requests.append(pickle.loads(pickle.dumps(request)))
        future = Future()
        if (error := self._lose(len(self.requests))) is not None:
            future.set_exception(error)
        else:
            future.set_result(pickle.loads(pickle.dumps(fn(*args))))
        return future


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prune", [True, False])
def test_rows_are_those_of_one_device(policy, prune):
    problems = [problem(n, d) for n in (13, 8, 1) for d in Direction]
    options = {"batch_policy": policy, "prune": prune}
    alone = tuner(**options).measure_all(problems)
    executor = Here()
    assert tuner(executor=executor, **options).measure_all(problems) == alone
    asked = [
        (str(r["problem"] | {"x_shape": r["problem"]["x_shape"][1:]}), a, r["batch"])
        for r in (request["size"] for request in executor.requests)
        for a in r["workspaces"]
    ]
    assert len(asked) == len(set(asked)), "something was measured twice"


def test_nothing_known_is_asked_for_again():
    cache = BenchmarkCache()
    first = tuner(cache=cache).measure_all([problem(8)])
    executor = Here()
    assert tuner(cache=cache, executor=executor).measure_all([problem(8)]) == first
    assert executor.requests == []
    assert tuner(executor=executor).measure_all([]) == ()


def test_the_rule_limits_and_device_are_those_of_the_tuner():
    executor = Here()
    one = tuner(
        backend=get_backend("null", 3), executor=executor, memory_limit=9000, cache=None
    )
    alone = tuner(backend=get_backend("null", 3), memory_limit=9000)
    assert one.measure(problem()) == alone.measure(problem())
    assert {r["index"] for r in executor.requests} == {3}
    late = tuner(executor=executor, time_limit_s=0.0).measure(problem())
    assert {perf.status for perf in late.perfs} == {RowStatus.LIMITED}


def test_a_process_pool_measures_on_the_cpu(tmp_path):
    problems = [problem(5, direction) for direction in Direction]
    done = []
    path = tmp_path / "cache.sqlite"
    with spawned(2) as pool:
        one = tuner(backend="cpu", executor=pool, cache=path, progress=done.append)
        tables = one.measure_all(problems)
        assert os.getpid() not in {p.pid for p in multiprocessing.active_children()}
    alone = tuner(backend="cpu")
    assert keys(*tables) == keys(*alone.measure_all(problems))
    assert all(perf.time_ms > 0 for t in tables for perf in t.perfs)
    assert all(t.usable for t in tables)
    with BenchmarkCache(path) as kept:
        remembered = [
            (row.problem.with_batch(1), row.perf.algo, row.perf.batch)
            for row in kept.rows()
        ]
    measured = [at for at in done if at.algo]
    assert len(remembered) == len(set(remembered)) == len(measured)
    one.close()


def test_workers_of_another_version_are_refused():
    with (
        spawned(1, pretend_another_library) as pool,
        pytest.raises(ValueError, match=r"mucudnn-0\.0\.1.* of the worker .*process"),
    ):
        tuner(backend="cpu", executor=pool).measure(problem())


def test_a_worker_that_dies_costs_nothing_but_time(tmp_path, caplog):
    """It breaks a process pool: the rest is measured here, once."""
    problems = [problem(n) for n in (8, 3)]
    cache = BenchmarkCache()
    with spawned(2, die_once, str(tmp_path)) as pool:
        tables = tuner(executor=pool, cache=cache).measure_all(problems)
    assert (tmp_path / "died").exists()
    assert tables == tuner().measure_all(problems)
    assert "a worker was lost" in caplog.text
    assert len(cache.rows()) == len({(r.perf.algo, r.perf.batch) for r in cache.rows()})


def test_a_kernel_that_kills_its_worker_is_a_failed_row(installed):  # noqa: F811
    backend = get_backend("misbehaving:KILL+GOOD")
    with spawned(1) as pool:
        one = tuner(backend=backend, executor=pool, isolate=False)
        table = one.measure(problem(2))
    good = [perf for perf in table.perfs if perf.error is None]
    assert {(p.algo, p.batch) for p in good} == {("GOOD", 2), ("GOOD", 1)}
    lost = [perf.error for perf in table.perfs if perf.algo == "KILL"]
    assert lost == ["the measuring process ended by SIGKILL while running it"] * 2
    mine = str(os.getpid())
    assert all(perf.notes != (mine,) for perf in good)


def test_isolated_workers_survive_such_a_kernel(installed):  # noqa: F811
    backend = get_backend("misbehaving:ABORT+GOOD")
    with spawned(1) as pool:
        one = tuner(backend=backend, executor=pool)
        table = one.measure(problem(4))
        assert pool.submit(os.getpid).result() != os.getpid(), "the pool is broken"
    assert {p.algo for p in table.usable} == {"GOOD"}
    lost = [perf.error for perf in table.perfs if perf.algo == "ABORT"]
    assert lost == ["the measuring process ended by SIGABRT while running it"] * 3


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_what_one_loss_costs_is_measured_here_and_the_rest_there(lost, caplog):
    def lose(nth):
        return ConnectionError("the worker is gone") if nth == lost else None

    executor = Here(lose)
    assert tuner(executor=executor).measure(problem()) == tuner().measure(problem())
    assert len(executor.requests) == 4
    assert "ConnectionError: the worker is gone" in caplog.text


def test_ctrl_c_keeps_what_has_come():
    class Interrupted(Here):
        def submit(self, fn, /, *args, **kwargs):
            if len(self.requests) == 3:
                raise KeyboardInterrupt
            return super().submit(fn, *args, **kwargs)

    cache = BenchmarkCache()
    with pytest.raises(KeyboardInterrupt):
        tuner(executor=Interrupted(), cache=cache).measure_all([problem(8)])
    assert {row.perf.batch for row in cache.rows()} == {1, 8, 4}
    assert len(cache.rows()) == 6


def test_a_late_worker_is_not_waited_for():
    class Silent(Here):
        def submit(self, fn, /, *args, **kwargs):
            self.last = Future()
            return self.last

    now = [0.0]

    def no_time(futures, timeout, return_when):
        now[0] += timeout
        return set(), set(futures)

    executor = Silent()
    one = measuring(
        get_backend("null"),
        BenchmarkCache(),
        time_limit_s=5.0,
        clock=lambda: now[0],
        workers=Workers(executor, wait=no_time),
    )
    (table,) = one.measure_all([problem(2)])
    assert {perf.status for perf in table.perfs} == {RowStatus.LIMITED}
    assert executor.last.cancelled()


def test_mistakes_are_told_at_once():
    with pytest.raises(TypeError, match="executor is 4; give a"):
        tuner(executor=4)
    with pytest.raises(TypeError, match="ProcessPoolExecutor"):
        tuner(executor=ProcessPoolExecutor)
    with pytest.raises(ValueError, match="either benchmark_backends"):
        tuner(executor=Here(), benchmark_backends=[get_backend("null")])
    closed = ThreadPoolExecutor(1)
    closed.shutdown()
    with pytest.raises(BackendUnavailableError, match="takes no tasks"):
        tuner(executor=closed).measure(problem())
    no_library = Here(lambda nth: ModuleNotFoundError("No module named 'mucudnn'"))
    with pytest.raises(BackendUnavailableError, match="has no mucudnn"):
        tuner(executor=no_library).measure(problem())


def test_a_worker_without_the_backend_is_told_of(monkeypatch):
    def missing(name, index):
        raise BackendUnavailableError("no such library")

    monkeypatch.setattr(worker, "get_backend", missing)
    monkeypatch.setattr(worker, "_station", worker.PerProcess(worker._Station))
    with pytest.raises(BackendUnavailableError, match="'null': no such library"):
        tuner(executor=Here()).measure(problem())


def test_threads_of_one_worker_measure_one_at_a_time(monkeypatch):
    inside = []

    def run(timer, request, on_row):
        inside.append(1)
        assert len(inside) == 1
        inside.pop()

    executor = Here()
    tuner(executor=executor, batch_policy="undivided").measure(problem())
    monkeypatch.setattr(worker, "measure_size", run)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(worker.answer, executor.requests * 64))
    assert all(answer["rows"] == [] for answer in answers)


@pytest.mark.parametrize(("many", "layers"), [(2, 20), (16, None)])
def test_the_time_is_divided_by_the_workers(many, layers):
    """DeepBench's training list, by the work that its rows stand for."""
    executor, cache = VirtualWorkers(many), BenchmarkCache()
    workers = Workers(executor, wait=executor.wait)
    one = measuring(get_backend("null"), cache, workers=workers)
    problems = [layer.problem for layer in load_suite("deepbench_train")][:layers]
    tables = one.measure_all(problems)
    rows = {(t.problem.with_batch(p.batch), p.algo): p for t in tables for p in t.perfs}
    alone_ms = sum(cost_ms(problem, row) for (problem, _), row in rows.items())
    assert executor.work_ms == pytest.approx(alone_ms)
    assert alone_ms / many <= executor.now_ms <= alone_ms / (0.85 * many)


def test_the_command_measures_in_processes():
    tune = ("tune", "alexnet", "--backend", "null", "--cache", "none", "--batch", 8)
    assert done(*tune, "--workers", 2) == done(*tune)


def test_a_pool_of_ours_is_deaf_to_interrupts_and_ends():
    with process_pool(1) as pool:
        (pid,) = {pool.submit(os.getpid).result()}
    assert pid not in {p.pid for p in multiprocessing.active_children()}
