"""Planning, proving and configuring, on the null backend's virtual clock."""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, strategies as st

from mucudnn import conv2d
from mucudnn.backends import get_backend
from mucudnn.errors import BackendError, OutOfMemoryError, PlanningError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.sizes import format_bytes
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.convolutions import compare
from mucudnn.suites import Layer
from tests.doubles import QUICK, arrays, plan_of, problem, watched
from tests.examples import examples
from tests.shaky import shaky

KIB = 1 << 10
POLICIES = ("undivided", "powers_of_two", "all")


def tuner(**options):
    return Tuner(**{"backend": "null", "rule": QUICK, "cache": None, **options})


@given(
    batch=st.integers(1, 20),
    limit=st.integers(0, 24 * KIB),
    policy=st.sampled_from(POLICIES),
)
@examples(40)
def test_a_plan_fits_and_is_no_slower_than_undivided(batch, limit, policy):
    one = tuner(workspace_limit=limit, batch_policy=policy)
    (plan,) = one.plan([problem(batch)])
    assert plan.workspace <= limit
    undivided = one.undivided(one.measure(problem(batch)), limit)
    assert plan.time_ms <= undivided.time_ms


@pytest.mark.parametrize(
    ("limit", "steps"),
    [
        (8 * KIB, {("FAST", 8)}),
        (8 * KIB - 1, {("FAST", 4)}),
        (KIB, {("FAST", 1)}),
        (KIB - 1, {("SLOW", 8)}),
        (0, {("SLOW", 8)}),
    ],
)
def test_one_byte_less_is_another_plan(limit, steps):
    (plan,) = tuner(workspace_limit=limit).plan([problem(8)])
    assert {(s.algo, s.batch) for s in plan.steps} == steps


def test_a_limit_below_everything_says_what_is_needed():
    def fail(problem, algo):
        if algo == "SLOW":
            raise BackendError("no")

    one = tuner(backend=watched(before=fail), workspace_limit=KIB - 1)
    with pytest.raises(PlanningError, match="smallest needs 1024"):
        one.plan([problem()])


def slow_divided(penalty_ms):
    """Kernels that take longer wherever they follow a kernel of the same size."""
    last = []

    def before(problem, algo):
        if (algo, problem.batch) in last and algo == "FAST" and arming:
            backend.device.advance(penalty_ms)
        last[:] = [(algo, problem.batch)]

    arming = []
    backend = watched(before=before)
    return backend, arming


def composed(penalty_ms, **options):
    backend, arming = slow_divided(penalty_ms)
    one = tuner(backend=backend, workspace_limit=4 * KIB, **options)
    one.measure(problem(8))
    arming.append(True)
    return one, backend


@pytest.mark.parametrize(
    ("penalty_ms", "steps"), [(100.0, [("SLOW", 8)]), (0.0, [("FAST", 4)] * 2)]
)
def test_whether_a_division_keeps_its_word_is_remembered(penalty_ms, steps):
    one, backend = composed(penalty_ms)
    (plan,) = one.plan([problem(8)])
    assert [(s.algo, s.batch) for s in plan.steps] == steps
    clock = backend.device.now_ms
    again = tuner(backend=backend, workspace_limit=4 * KIB, cache=one.cache)
    assert again.plan([problem(8)]) == (plan,)
    assert backend.device.now_ms == clock
    (trusting,) = tuner(
        backend=backend, workspace_limit=4 * KIB, cache=one.cache, validate=False
    ).plan([problem(8)])
    assert trusting.divided


def test_as_slow_as_undivided_is_not_worth_a_division():
    one, _ = composed(penalty_ms=0.0)
    (plan,) = one.plan([problem(8)])
    undivided = one.undivided(one.measure(problem(8)), 4 * KIB)
    gain = undivided.time_ms - plan.time_ms
    other, _ = composed(penalty_ms=gain + 1e-9)
    assert not other.plan([problem(8)])[0].divided


@pytest.mark.parametrize("error", [BackendError, OutOfMemoryError])
def test_a_division_that_cannot_be_proved_is_not_used(error, caplog):
    failing = []

    def fail(problem, algo):
        if failing and algo == "FAST":
            raise error("not today")

    one = tuner(backend=watched(before=fail), workspace_limit=4 * KIB)
    one.measure(problem(8))
    failing.append(True)
    assert not one.plan([problem(8)])[0].divided
    assert "as no gain could be verified" in caplog.text
    failing.clear()
    assert one.plan([problem(8)])[0].divided


def test_choice_tells_both_times():
    one, _ = composed(penalty_ms=0.0)
    table = one.measure(problem(8))
    (plan,) = one.planner([table], 4 * KIB)
    undivided = one.undivided(table, 4 * KIB)
    choice = one.validate(plan, undivided)
    assert choice.planned_ms == pytest.approx(2 * (4 * 0.4 + 0.1))
    assert choice.undivided_ms == pytest.approx(8.1)
    assert choice.speedup == pytest.approx(8.1 / 3.4)
    assert one.validate(plan, None).speedup is None
    assert one.validate(undivided, undivided).speedup == 1.0


@given(
    total=st.integers(0, 40 * KIB),
    batches=st.lists(st.integers(1, 12), min_size=1, max_size=4),
)
@examples(15)
def test_a_total_is_a_sum(total, batches):
    plans = tuner(total_workspace=total).plan([problem(b) for b in batches])
    assert sum(plan.workspace for plan in plans) <= total


def test_a_total_of_nothing_is_a_total():
    one = tuner(total_workspace=0, workspace_limit=1 << 30)
    plans = one.plan([problem(8), problem(4)])
    assert [plan.workspace for plan in plans] == [0, 0]


def test_devices_of_two_models_are_refused():
    with pytest.raises(ValueError, match="'null' are not valid for 'cpu"):
        tuner(benchmark_backends=[get_backend("null"), get_backend("cpu")])


def test_threads_get_one_compiled_plan_measured_once():
    backend = watched()
    one = tuner(backend=backend)
    ready = threading.Barrier(8)

    def ask(_):
        ready.wait()
        return one.compiled(problem(8))

    with ThreadPoolExecutor(8) as pool:
        plans = list(pool.map(ask, range(8)))
    assert len({id(plan) for plan in plans}) == 1
    alone = watched()
    tuner(backend=alone).compiled(problem(8))
    assert sorted(backend.conv.calls) == sorted(alone.conv.calls)


def test_prepared_problems_share_a_total_and_are_hits():
    one = tuner(total_workspace=12 * KIB)
    plans = one.prepare([problem(8), problem(4)])
    clock = one.backend.device.now_ms
    assert tuple(one.compiled(p.problem).plan for p in plans) == plans
    assert one.backend.device.now_ms == clock


def test_adopting_measures_nothing():
    one = tuner()
    plan = plan_of(one.backend, problem(8), ("FAST", 5), ("SLOW", 3))
    assert one.adopt(plan).plan == plan
    assert one.compiled(problem(8)).plan == plan
    assert one.backend.device.now_ms == 0


def test_another_tuner_explains_by_the_limit_of_the_plan():
    maker, reader = tuner(workspace_limit=4 * KIB), tuner(workspace_limit=64 * KIB)
    (plan,) = maker.plan([problem(8)])
    assert plan.workspace_limit == 4 * KIB
    assert "at most 4.0 KiB of workspace" in reader.explain(plan)


def test_a_planner_of_ones_own_need_not_know_of_limits():
    def mine(tables, limit):
        return [
            ConvPlan(t.problem, (t.fastest(t.problem.batch, limit),)) for t in tables
        ]

    (plan,) = tuner(planner=mine, workspace_limit=5 * KIB).plan([problem(8)])
    assert plan.workspace_limit == 5 * KIB


@pytest.mark.parametrize("total", [4 * KIB, 9 * KIB, 40 * KIB])
def test_under_a_total_a_plan_knows_its_share(total):
    one = tuner(total_workspace=total)
    plans = one.plan([problem(8), problem(16), problem(4)])
    assert sum(plan.workspace_limit for plan in plans) <= total
    for plan in plans:
        assert f"at most {format_bytes(plan.workspace_limit)} of" in one.explain(plan)


@pytest.mark.parametrize("seed", range(6))
def test_what_a_comparison_measured_is_what_is_explained(seed):
    """Kernels vary and slow each other down: sums promise more than plans keep."""
    limit, seen = 4 * KIB, set()
    for batch in (11, 12, 16):
        one = Tuner(backend=shaky(seed), workspace_limit=limit, batch_policy="all")
        layer = Layer("conv", problem(batch), 1)
        (result,) = compare(one, [layer], [limit]).layers
        choice = result.outcomes[0].choice
        (plan,) = one.plan([layer.problem])
        text = one.explain(plan)
        if choice.rejected:
            assert "not faster than undivided when run together" in text
        elif choice.plan.divided:
            assert f"{choice.speedup:.2f}× as fast as undivided when run" in text
        seen.add((choice.rejected, choice.plan.divided))
    assert seen - {(False, False)}


def test_a_tuner_says_what_it_is_in_a_line():
    one = tuner(workspace_limit="3MiB", batch_policy="all")
    assert repr(one) == (
        "Tuner(null, 3.0 MiB of workspace a kernel, all, workspace_reuse, 0 ready)"
    )
    one = tuner(total_workspace=12 * KIB)
    one.prepare([problem(8), problem(4)])
    conv2d(*arrays(problem(8))[:2], tuner=one)
    assert repr(one) == (
        "Tuner(null, 12.0 KiB of workspace in all, powers_of_two, workspace_division, "
        "2 ready)"
    )


def test_a_with_closes_and_a_closed_tuner_opens_what_it_needs(tmp_path):
    file = tmp_path / "cache.sqlite"
    with tuner(cache=file) as one:
        (plan,) = one.plan([problem(8)])
        one.compiled(problem(8))(*arrays(problem(8)))
        cache = one.cache
    one.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        cache.rows()
    one.compiled(problem(8))(*arrays(problem(8)))
    clock = one.backend.device.now_ms
    assert tuner(backend=one.backend, cache=file).plan([problem(8)]) == (plan,)
    assert one.backend.device.now_ms == clock
    one.plan([problem(4)])
    assert {row.problem.batch for row in one.cache.rows()} == {1, 2, 4, 8}
    one.close()


def test_a_cache_that_was_given_stays_open(tmp_path):
    with BenchmarkCache(tmp_path / "cache.sqlite") as cache:
        for _ in range(2):
            with tuner(cache=cache) as one:
                one.plan([problem(8)])
        assert cache.rows()


def test_closing_gives_workspaces_back():
    backend = get_backend("null")
    given = []
    allocate = backend.device.allocate
    backend.device.allocate = lambda nbytes: given.append(nbytes) or allocate(nbytes)
    one = tuner(backend=backend)
    ready = one.adopt(plan_of(backend, problem(8), ("FAST", 8)))
    for _ in range(2):
        for _ in range(2):
            ready(*arrays(problem(8)))
        one.close()
    assert given == [8 * KIB] * 2
