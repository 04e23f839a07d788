"""Planning, proving, configuring and replaying, on the null backend's virtual clock."""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import example, given, strategies as st

from mucudnn import conv2d
from mucudnn.backends import Backend, get_backend
from mucudnn.backends.recorded import RecordedConv
from mucudnn.backends.virtual import VirtualDevice
from mucudnn.errors import BackendError, OutOfMemoryError, PlanningError
from mucudnn.ir.conv import ConvPlan, Direction, PerfTable
from mucudnn.ir.measurement import Measurement, Verdict, signature
from mucudnn.ir.sizes import format_bytes
from mucudnn.passes.convolution.pareto import least_workspace, pareto_plans
from mucudnn.passes.microbatch import workspace_reuse
from mucudnn.recording_format import read_recording
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.store.recordings import record_run
from mucudnn.runtime.tuning.timing import LAUNCH_OVERHEAD_MS, StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.convolutions import compare, in_directions
from mucudnn.suites import Layer
from tests.doubles import QUICK, arrays, plan_of, problem, watched
from tests.examples import examples
from tests.shaky import shaky
from tests.tables import perf, perf_tables

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
@example(0, [8, 4])
@examples(15)
def test_a_total_is_a_sum(total, batches):
    one = tuner(total_workspace=total, workspace_limit=1 << 30)
    plans = one.plan([problem(b) for b in batches])
    assert sum(plan.workspace for plan in plans) <= total


def test_prepared_problems_share_a_total_and_they_and_adopted_plans_are_hits():
    with pytest.raises(ValueError, match="'null' are not valid for 'cpu"):
        tuner(benchmark_backends=[get_backend("null"), get_backend("cpu")])
    one = tuner(total_workspace=12 * KIB)
    plans = one.prepare([problem(8), problem(4)])
    clock = one.backend.device.now_ms
    assert tuple(one.compiled(p.problem).plan for p in plans) == plans
    plan = plan_of(one.backend, problem(7), ("FAST", 5), ("SLOW", 2))
    assert one.adopt(plan).plan == one.compiled(problem(7)).plan == plan
    assert one.backend.device.now_ms == clock


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


@pytest.mark.parametrize("total", [4 * KIB, 9 * KIB, 40 * KIB])
def test_a_plan_knows_its_limit_or_its_share_of_a_total(total):
    """Whoever explains it; a planner of one's own need not know of limits."""

    def mine(tables, limit):
        return [
            ConvPlan(t.problem, (t.fastest(t.problem.batch, limit),)) for t in tables
        ]

    one = tuner(total_workspace=total)
    plans = one.plan([problem(8), problem(16), problem(4)])
    assert sum(plan.workspace_limit for plan in plans) <= total
    plans += tuner(planner=mine, workspace_limit=total).plan([problem(8)])
    assert plans[-1].workspace_limit == total
    for plan in plans:
        limit = format_bytes(plan.workspace_limit)
        assert f"at most {limit} of workspace" in one.explain(plan)


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


def test_a_with_closes_what_was_not_given_and_a_closed_tuner_opens_it(tmp_path):
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


LIMITS = (0, KIB, 4 * KIB, 9 * KIB, 30 * KIB, 1 << 20)
ROUGH = StoppingRule(min_samples=3, max_samples=5)


def replayed(table, verdicts=()):
    """The machine that measured a table, as a backend."""
    device = VirtualDevice("machine")
    rows = [
        Measurement(
            fingerprint="machine",
            problem=table.problem.with_batch(row.batch),
            perf=row,
            measured_at=0.0,
            version="0",
        )
        for row in table.perfs
    ]
    return Backend("machine", device, RecordedConv(device, rows, verdicts))


@given(perf_tables(max_batch=6, noisy=True, integers=False))
@examples(60)
def test_every_plan_of_a_table_is_the_plan_of_its_replay(table):
    """Noise counts, and nothing that was measured is left out, pruning or not."""
    rows = sorted(table.perfs, key=lambda row: (-row.batch, row.algo))
    ordered = replace(table, perfs=tuple(rows), launch_overhead_ms=LAUNCH_OVERHEAD_MS)
    there = Tuner(backend=replayed(table), batch_policy="all", validate=False)
    assert there.measure(table.problem).usable == ordered.usable
    for limit in range(9):
        there.workspace_limit = limit
        assert there.plan([table.problem]) == workspace_reuse([ordered], limit)


def test_a_shaky_algorithm_is_no_faster_elsewhere():
    rows = (
        perf("SHAKY", 8, 0.98, 0, noise_ms=0.05, samples=25),
        perf("STEADY", 8, 1.00, 0, noise_ms=0.01, samples=5),
    )
    there = Tuner(backend=replayed(PerfTable(problem(8), rows)))
    assert there.measure(problem(8)).usable == rows
    (plan,) = there.plan([problem(8)])
    assert [step.algo for step in plan.steps] == ["STEADY"]


def plans(tuner, problems):
    """Under every limit in turn, with one tuner."""
    found = []
    for limit in LIMITS:
        tuner.workspace_limit = limit
        found += tuner.plan(problems)
    return found


@pytest.mark.parametrize("policy", ["powers_of_two", "all"])
@pytest.mark.parametrize("seed", range(6))
def test_what_a_machine_planned_is_planned_elsewhere(seed, policy, tmp_path):
    """Pruned there, tried out there, on kernels that vary: not one plan differs."""
    file = tmp_path / "r.json.gz"
    options = {"batch_policy": policy, "rule": ROUGH}
    here = Tuner(backend=shaky(seed, alignment=8), **options)
    problems = [problem(n, w_shape=(n, 3, 3, 3)) for n in (11, 12, 13, 16)]
    expected = plans(here, problems)
    tables = [here.measure(problem) for problem in problems]
    record_run(file, here, problems, tables, since=0.0)
    there = Tuner(backend=f"recorded:{file}", **options)
    assert plans(there, problems) == expected
    assert {*there.verdicts} == {*here.verdicts}


def test_what_was_misaligned_is_misaligned_elsewhere(tmp_path):
    """A sample was measured as a whole mini-batch; as a part it breaks alignment."""
    file = tmp_path / "r.json"
    here = Tuner(backend=shaky(0, alignment=8), rule=ROUGH)
    tables = [here.measure(problem(n)) for n in (1, 8)]
    record_run(file, here, [problem(8)], tables, since=0.0)
    there = Tuner(backend=f"recorded:{file}", rule=ROUGH)
    assert there.measure(problem(8)).batches() == (2, 4, 8)
    assert there.measure(problem(1)).batches() == (1,)


@pytest.mark.parametrize("total", [None, 40 * KIB])
def test_a_comparison_comes_out_alike_elsewhere(total, tmp_path):
    file = tmp_path / "r.json"
    layers = in_directions([Layer("conv", problem(16), 1)], list(Direction))

    def outcomes(tuner):
        found = compare(tuner, layers, LIMITS, total_workspace=total)
        tables = [layer.table for layer in found.layers]
        choices = [o.choice for layer in found.layers for o in layer.outcomes]
        return tables, [
            c and (c.plan, c.undivided, c.rejected, c.speedup) for c in choices
        ]

    here = Tuner(backend=shaky(5), rule=ROUGH)
    tables, expected = outcomes(here)
    record_run(file, here, [layer.problem for layer in layers], tables, since=0.0)
    _, found = outcomes(Tuner(backend=f"recorded:{file}"))
    for (*chosen, speedup), (*chosen_there, speedup_there) in zip(
        expected, found, strict=True
    ):
        assert chosen_there == chosen
        assert speedup_there == pytest.approx(speedup, rel=1e-12)
    assert {True, False} == {rejected for _, _, rejected, _ in expected}


def tried(table, ratio):
    """A recording in which the plan for 4 KiB was run whole."""
    plan, baseline = (
        Tuner(backend=replayed(table), planner=planner, validate=False, **LIMIT).plan(
            [table.problem]
        )[0]
        for planner in ("workspace_reuse", "undivided")
    )
    verdict = Verdict(
        fingerprint="machine",
        problem=table.problem,
        signature=signature(plan, baseline),
        ratio=ratio,
    )
    return replayed(table, [verdict]), plan, baseline


LIMIT = {"workspace_limit": 4 * KIB}
DIVISIBLE = PerfTable(
    problem(8),
    (
        perf("FAST", 4, 1.0, 4 * KIB),
        perf("FAST", 8, 1.9, 8 * KIB),
        perf("SLOW", 8, 4.0, 0),
    ),
)


def test_a_recorded_verdict_wins_over_the_sum_of_its_kernels_and_the_cache():
    for ratio in (0.75, 1.0):
        backend, plan, baseline = tried(DIVISIBLE, ratio)
        cache = BenchmarkCache()
        other = 1.0 if ratio < 1 else 0.5
        cache.put_verdict("machine", plan.problem, signature(plan, baseline), other)
        there = Tuner(backend=backend, cache=cache, **LIMIT)
        assert there.plan([plan.problem]) == (plan if ratio < 1 else baseline,)
        choice = there.validate(plan, baseline)
        assert choice.rejected == (ratio == 1.0)
        assert choice.speedup == 1 / ratio
        assert [v.ratio for v in there.verdicts] == [ratio]
        assert backend.device.now_ms == 0


def test_where_a_recording_is_silent_the_sum_or_an_earlier_comparison_decides():
    _, plan, baseline = tried(DIVISIBLE, 1.0)
    there = Tuner(backend=replayed(DIVISIBLE), **LIMIT)
    assert there.plan([plan.problem]) == (plan,)
    assert there.validate(plan, baseline).planned_ms == 2.0
    assert there.verdicts == ()
    known = there.cache.get_verdict("machine", plan.problem, signature(plan, baseline))
    assert known is None
    here = Tuner(backend=shaky(4), rule=ROUGH)
    layers = [Layer("conv", problem(16), 1)]
    compare(here, layers, LIMITS)
    later = Tuner(backend=shaky(4), rule=ROUGH, cache=here.cache)
    found = plans(later, [problem(16)])
    assert any(plan.divided for plan in found)
    assert {*later.verdicts} <= {*here.verdicts}
    assert later.backend.device.now_ms == 0


def test_a_cache_exports_what_decides_plans(tmp_path):
    here = Tuner(backend=shaky(4), rule=ROUGH)
    expected = plans(here, [problem(16)])
    here.cache.export_json(tmp_path / "r.json")
    there = Tuner(backend=f"recorded:{tmp_path / 'r.json'}", rule=ROUGH)
    assert plans(there, [problem(16)]) == expected
    assert there.verdicts


def test_only_whole_verdicts_and_what_was_asked_for_are_recorded(tmp_path):
    here = Tuner(backend=get_backend("null"), **LIMIT)
    table = here.measure(problem(8))
    (plan,) = workspace_reuse([table], 4 * KIB)
    baseline = here.undivided(table, 4 * KIB)
    here.validate(plan, baseline, time_limit_s=0.0)
    assert here.cache.get_verdict("null", problem(8), signature(plan, baseline)) is None
    here.validate(plan, baseline)
    assert here.cache.get_verdict("null", problem(8), signature(plan, baseline)) < 1.0
    here = Tuner(backend=shaky(4), rule=ROUGH)
    mine, other = problem(16), problem(16, w_shape=(5, 3, 3, 3))
    plans(here, [mine, other])
    file = tmp_path / "r.json"
    record_run(file, here, [mine], [here.measure(mine)], since=0.0)
    found = read_recording(file.read_bytes())
    assert {m.problem.with_batch(16) for m in found.measurements} == {mine}
    assert found.verdicts == tuple(v for v in here.verdicts if v.problem == mine)
    assert len(found.verdicts) < len(here.verdicts)


HUGE = (10**6, 99_999_999, 10**8, 2**36)


@pytest.mark.parametrize("batch", HUGE)
@pytest.mark.parametrize("policy", ["powers_of_two", "all"])
def test_what_is_too_large_is_refused_before_anything_is_measured(batch, policy):
    backend = watched()
    one = Tuner(backend=backend, rule=QUICK, batch_policy=policy)
    with pytest.raises(PlanningError, match=rf"mini-batch of {batch} .* too large"):
        one.plan([problem(batch)])
    assert backend.conv.calls == []
    layers = [Layer("huge", problem(batch), 1), Layer("small", problem(4), 1)]
    huge, small = compare(one, layers, [1 << 20]).layers
    assert "too large to be divided" in huge.outcomes[0].reason
    assert small.outcomes[0].choice is not None


@pytest.mark.parametrize(
    ("policy", "batch"),
    [*(("undivided", n) for n in HUGE), ("powers_of_two", 100_000), ("all", 1_000)],
)
def test_what_is_large_is_planned(policy, batch):
    one = Tuner(backend="null", rule=QUICK, batch_policy=policy, workspace_limit="1MiB")
    (plan,) = one.plan([problem(batch)])
    assert sum(step.batch for step in plan.steps) == batch
    assert policy != "undivided" or len(plan.steps) == 1


@pytest.mark.parametrize("batch", HUGE)
def test_a_table_of_a_huge_batch_is_refused_too(batch):
    rows = (perf("A", 1, 1.0, 0), perf("A", 3, 2.0, 8), perf("B", batch, 9.0, 1))
    table = PerfTable(problem(batch), rows)
    for ask in (
        lambda: workspace_reuse([table], 8),
        lambda: pareto_plans(table, 8),
        lambda: least_workspace(table),
    ):
        with pytest.raises(PlanningError, match="too large to be divided"):
            ask()


@given(st.integers(1, 40), st.integers(1, 10**9), st.data())
@examples(40)
def test_a_common_unit_changes_nothing_but_the_sizes(batch, unit, data):
    sizes = data.draw(st.sets(st.integers(1, batch), min_size=1, max_size=5)) | {batch}
    rows = [(n, data.draw(st.integers(1, 9)) * n, n % 3) for n in sorted(sizes)]

    def front(unit):
        perfs = tuple(perf("A", n * unit, float(ms), w) for n, ms, w in rows)
        table = PerfTable(problem(batch * unit), perfs)
        plans = pareto_plans(table, 9)
        return least_workspace(table), [
            [(s.batch // unit, s.workspace) for s in p.steps] for p in plans
        ]

    assert front(unit) == front(1)


@pytest.mark.parametrize("ask", ["plan", "prepare", "measure_all"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (problem(8), r"problems must be a list of problems, such as \[problem\]"),
        ((p for p in [problem(8)]), "problems must be a list .*, got <generator"),
        (["conv1"], "problem must be a ConvProblem, got 'conv1'"),
    ],
)
def test_what_is_not_a_list_of_problems_is_refused(ask, given, words):
    with pytest.raises(TypeError, match=words):
        getattr(tuner(), ask)(given)


@pytest.mark.parametrize("ask", ["adopt", "explain"])
def test_what_is_not_a_plan_is_refused(ask):
    with pytest.raises(TypeError, match="plan must be a ConvPlan"):
        getattr(tuner(), ask)(problem(8))
