"""Kernels timed in real child processes, some of which do not live long."""

import gc
import math
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mucudnn.backends import get_backend
from mucudnn.errors import BackendUnavailableError
from mucudnn.ir.numerics import RowStatus
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.isolation import ChildTimer, Isolation
from mucudnn.runtime.tuning.kernel_timer import (
    LocalTimer,
    MeasureLimits,
    SizeRequest,
    measure_size,
)
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner
from tests.commands import start_python
from tests.doubles import QUICK, problem, watched

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="needs /proc to count processes"
)

DIED = {
    "ABORT": "the measuring process ended by SIGABRT while running it",
    "EXIT": "the measuring process ended with exit status 3 while running it",
    "KILL": "the measuring process ended by SIGKILL while running it",
}


def running(pid):
    """Whether a process is there; one that has ended is, until we reap it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    state, parent = stat.rpartition(")")[2].split()[:2]
    return state != "Z" or int(parent) == os.getpid()


def gone(pids, within_s=300.0):
    """Whether processes that somebody else reaps end in time."""
    until = time.monotonic() + within_s
    while any(map(running, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(running, pids))


class Installed:
    """The misbehaving plug-in in a folder of its own, and who has loaded it."""

    def __init__(self, folder):
        self.folder = folder
        source = Path(__file__).with_name("misbehaving.py")
        (folder / "misbehaving_plugin.py").write_text(source.read_text())
        info = folder / "misbehaving_plugin-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: misbehaving_plugin\nVersion: 1\n")
        entry = "[mucudnn.backends]\nmisbehaving = misbehaving_plugin\n"
        (info / "entry_points.txt").write_text(entry)
        (folder / "parent").write_text(str(os.getpid()))

    def children(self):
        """Every process but this one that ever loaded the plug-in."""
        pids = self.folder / "pids"
        loaded = map(int, pids.read_text().split() if pids.exists() else ())
        return [pid for pid in loaded if pid != os.getpid()]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    plugin = Installed(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "misbehaving_plugin", raising=False)
    yield plugin
    sys.modules.pop("misbehaving_plugin", None)
    gc.collect()
    assert not any(map(running, plugin.children())), "a child or a zombie survives"


def rows_of(timer, algorithms, batch=4, largest=8, expected_ms=None, **limits):
    """The rows of some algorithms; `limits` are those of measuring, or `best_ms`."""
    best_ms = limits.pop("best_ms", math.inf)
    request = SizeRequest(
        problem=problem(largest),
        batch=batch,
        workspaces=dict(algorithms),
        limits=MeasureLimits(**{"rule": QUICK, **limits}),
        best_ms=best_ms,
        expected_ms=expected_ms or {},
    )
    rows = []
    measure_size(timer, request, rows.append)
    return rows


# --- the same rows -----------------------------------------------------------------


def test_rows_are_those_of_a_bench_in_this_process():
    """On a virtual clock nothing differs, whichever limit stops a kernel."""
    backend = get_backend("null", 3)
    here, there = LocalTimer(backend), ChildTimer(backend)
    pids = set()
    for options in ({}, {"memory_limit": 9000}, {"memory_limit": 10**9}):
        for rule in (StoppingRule(), StoppingRule(budget_ms=math.inf, max_samples=4)):
            settings = {"rule": rule, "best_ms": 0.9, **options}
            for batch in (8, 2):
                algorithms = backend.conv.algorithms(problem(batch))
                extra = [*algorithms, ("MISSING", 0)]
                expected = rows_of(here, extra, batch, **settings)
                assert (
                    rows_of(there, extra, batch, deadline=1e9, **settings) == expected
                )
                assert len(expected) == 3
            pids.add(there.pid)
            here.release()
            there.release()
    assert len(pids) == 1
    there.close()
    assert there.pid is None
    assert not Path(f"/proc/{pids.pop()}").exists()


def test_threads_may_share_a_child():
    """Requests of other problems take turns; each has its own settings."""
    timer = ChildTimer(get_backend("null"))

    def table(batch):
        micros = [micro for micro in range(1, batch + 1) for _ in range(3)]
        return [row for n in micros for row in rows_of(timer, [("SLOW", 0)], n, batch)]

    with ThreadPoolExecutor(4) as pool:
        tables = list(pool.map(table, (2, 4, 8, 16)))
    timer.close()
    for batch, rows in zip((2, 4, 8, 16), tables, strict=True):
        assert [row.batch for row in rows] == [
            micro for micro in range(1, batch + 1) for _ in range(3)
        ]
        assert all(row.error is None for row in rows)


def test_a_real_library_is_timed_in_the_child():
    """A double needs no more than a name: the child has the real kernels."""
    backend = watched("cpu")
    timer = ChildTimer(backend)
    algorithms = backend.conv.algorithms(problem(4))
    rows = rows_of(timer, algorithms)
    timer.release()
    assert rows_of(timer, algorithms[:1])[0].error is None
    timer.close()
    assert [(row.algo, row.workspace) for row in rows] == list(algorithms)
    assert all(row.error is None and row.time_ms > 0 for row in rows)
    assert backend.conv.calls == []


def test_no_child_is_started_for_what_a_limit_forbids(installed):
    timer = ChildTimer(get_backend("misbehaving:GOOD"))
    now, algorithms = time.monotonic(), [("GOOD", 0)]
    rows = rows_of(timer, algorithms, deadline=now)
    long = {"GOOD": 1e6}
    rows += rows_of(timer, algorithms, deadline=now + 100, expected_ms=long)
    assert all(
        row.status is RowStatus.LIMITED and "the time limit" in row.error
        for row in rows
    )
    assert installed.children() == []


# --- kernels that take the process with them ----------------------------------------


def test_each_misbehaving_kernel_costs_one_row(installed):
    backend = get_backend("misbehaving:")
    timer = ChildTimer(backend, hang_s=2.0)
    order = ["PRINT", "READ", "MEMORY", "UNSUPPORTED", "GOOD"]
    order.insert(4, "LIBRARY")  # it failed, and its device still works
    order += ["ABORT", "KILL", "HANG", "EXIT", "STATUS"]
    rows = {row.algo: row for row in rows_of(timer, [(algo, 0) for algo in order])}
    (last,) = rows_of(timer, [("GOOD", 0)], batch=2)
    timer.close()
    assert list(rows) == order
    for algo, error in DIED.items():
        assert rows[algo].error == error
        assert rows[algo].status is not RowStatus.LIMITED
    assert rows["HANG"].error == (
        "the measuring process was terminated after 2.12 s while running it"
    )
    assert rows["STATUS"].error == "BackendError: status 700: illegal address"
    assert rows["LIBRARY"].error == "ZeroDivisionError: in somebody's library"
    assert rows["UNSUPPORTED"].error == "UnsupportedError: not this shape"
    assert rows["MEMORY"].status is RowStatus.LIMITED
    for row in (rows["PRINT"], rows["READ"], rows["GOOD"], last):
        assert row.error is None
        assert row.time_ms == pytest.approx(row.batch * 1.0 + 0.1)
    assert all(row.time_ms == math.inf for row in rows.values() if row.error)
    first = {rows[algo].notes for algo in order[:6]}
    assert len(first) == 1, "what is harmless costs no new process"
    pids = installed.children()
    assert [str(pids[0])] == [*first.pop()]
    assert [str(pids[-1])] == [*last.notes]
    assert len(pids) == len(set(pids)) == 6  # one, and one after each of five deaths


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_idle_child_leaves_signals_to_us_and_is_replaced_when_killed(
    installed, number
):
    backend = get_backend("misbehaving:GOOD", 1)
    timer = ChildTimer(backend, hang_s=300.0)
    (before,) = rows_of(timer, [("GOOD", 0)])
    os.kill(timer.pid, number)
    assert rows_of(timer, [("GOOD", 0)]) == [before]
    os.kill(timer.pid, signal.SIGKILL)
    (after,) = rows_of(timer, [("GOOD", 0)])
    timer.close()
    assert before.error is None
    assert after.error is None
    assert before.notes != after.notes


# --- children that do not come up ---------------------------------------------------


@pytest.mark.parametrize(
    ("how", "attempts", "words"),
    [
        ("never", 3, ("misbehaving:never", "SIGABRT 3 times", "libstart.so: no such")),
        ("absent", 1, ("the driver is too old",)),
        ("late", 3, ()),
    ],
)
def test_a_child_that_does_not_start_is_started_again(how, attempts, words, installed):
    timer = ChildTimer(get_backend(f"misbehaving:{how}"))
    if words:
        with pytest.raises(BackendUnavailableError) as caught:
            rows_of(timer, [("GOOD", 0)])
        assert all(part in str(caught.value) for part in words)
        assert timer.pid is None
    else:
        (row,) = rows_of(timer, [("GOOD", 0)])
        assert row.error is None
        timer.close()
    assert len(installed.children()) == attempts


def test_without_a_python_to_start_the_way_out_is_named(monkeypatch):
    timer = ChildTimer(get_backend("null"))
    monkeypatch.setattr(sys, "executable", None)
    with pytest.raises(BackendUnavailableError, match="isolate=False"):
        rows_of(timer, [("SLOW", 0)])


# --- tuners --------------------------------------------------------------------------


def test_a_fragile_backend_is_isolated_and_others_are_not(installed):
    def kind(wanted, name):
        return type(Isolation(wanted).timer(get_backend(name)))

    assert kind(None, "misbehaving:GOOD") is ChildTimer
    assert kind(False, "misbehaving:GOOD") is LocalTimer
    assert kind(None, "null") is LocalTimer
    assert kind(True, "null") is ChildTimer


def test_isolated_tables_are_equal():
    devices = [get_backend("null", index) for index in (0, 1)]
    apart = Tuner(
        backend=devices[0], benchmark_backends=devices, isolate=True, rule=QUICK
    )
    together = Tuner(backend="null", rule=QUICK)
    assert apart.measure(problem()) == together.measure(problem())
    apart.close()


def test_one_child_serves_all_layers_of_a_tuner_and_ends_with_it(installed):
    tuner = Tuner(
        backend="misbehaving:GOOD", rule=QUICK, batch_policy="undivided", cache=None
    )
    tables = [tuner.measure(problem(batch)) for batch in (8, 4, 2)]
    (pid,) = installed.children()
    assert {row.notes for table in tables for row in table.perfs} == {(str(pid),)}
    del tuner
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


def test_a_crashing_algorithm_is_not_planned_and_not_tried_again(installed):
    cache = BenchmarkCache()
    crashes = []
    for _ in range(2):
        tuner = Tuner(
            backend="misbehaving:ABORT+GOOD",
            cache=cache,
            rule=QUICK,
            batch_policy="undivided",
        )
        (plan,) = tuner.plan([problem()])
        assert [step.algo for step in plan.steps] == ["GOOD"]
        crashes += [p for p in tuner.measure(problem()).perfs if p.algo == "ABORT"]
        tuner.close()
        assert not any(map(running, installed.children()))
    assert [crash.error for crash in crashes] == [DIED["ABORT"]] * 2
    assert len(installed.children()) == 3  # for ABORT, after it, and for GOOD again


# --- parents that end ----------------------------------------------------------------

SCRIPT = """
import os, sys, signal, time
from pathlib import Path
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.ir.conv import ConvProblem, Direction

tuner = Tuner(backend=sys.argv[1], batch_policy="undivided", cache=None)
shapes = {{"x_shape": (2, 3, 9, 9), "w_shape": (4, 3, 3, 3)}}
tuner.measure(ConvProblem(direction=Direction.FORWARD, **shapes))
{end}
"""


def script(installed, backend, end):
    """A user's script without a `__main__` guard, as the head of a process group."""
    file = installed.folder / "script.py"
    file.write_text(SCRIPT.format(end=end))
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return start_python(
        file, backend, environment=environment, stdout=None, start_new_session=True
    )


def children_of(installed, parent):
    return [pid for pid in installed.children() if pid != parent.pid]


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)],
    ids=["at its end", "by SIGKILL"],
)
def test_a_child_does_not_outlive_its_parent(installed, end, status):
    parent = script(installed, "misbehaving:GOOD", end)
    _, errors = parent.communicate(timeout=300)
    assert parent.returncode == status
    assert errors == ""
    children = children_of(installed, parent)
    assert len(children) == 1
    assert gone(children)


def test_ctrl_c_ends_the_child_and_then_the_program(installed):
    parent = script(installed, "misbehaving:HANG", "")
    try:
        until = time.monotonic() + 300
        while not (installed.folder / "hanging").exists():
            assert time.monotonic() < until
            assert parent.poll() is None
            time.sleep(0.02)
        os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
        _, errors = parent.communicate(timeout=300)
    finally:
        parent.kill()
    assert parent.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    children = children_of(installed, parent)
    assert len(children) == 1
    assert gone(children)
