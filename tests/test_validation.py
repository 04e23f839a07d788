"""A replay chooses what the machine chose: by its noise, and by what it tried out."""

from dataclasses import replace

import pytest
from hypothesis import given

from mucudnn.backends import Backend, get_backend
from mucudnn.backends.recorded import RecordedConv
from mucudnn.backends.virtual import VirtualDevice
from mucudnn.ir.conv import Direction, PerfTable
from mucudnn.ir.measurement import Measurement, Verdict, signature
from mucudnn.passes.microbatch import workspace_reuse
from mucudnn.recording_format import read_recording
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.store.recordings import record_run
from mucudnn.runtime.tuning.timing import LAUNCH_OVERHEAD_MS, StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.convolutions import compare, in_directions
from mucudnn.suites import Layer
from tests.doubles import problem
from tests.examples import examples
from tests.shaky import shaky
from tests.tables import perf, perf_tables

KIB = 1 << 10
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


def test_where_a_recording_is_silent_the_sum_decides_and_nothing_is_claimed():
    _, plan, baseline = tried(DIVISIBLE, 1.0)
    there = Tuner(backend=replayed(DIVISIBLE), **LIMIT)
    assert there.plan([plan.problem]) == (plan,)
    assert there.validate(plan, baseline).planned_ms == 2.0
    assert there.verdicts == ()
    known = there.cache.get_verdict("machine", plan.problem, signature(plan, baseline))
    assert known is None


def test_a_comparison_leaves_its_verdicts_to_later_tuners():
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


def test_a_run_that_was_cut_short_leaves_no_verdict_behind():
    here = Tuner(backend=get_backend("null"), **LIMIT)
    table = here.measure(problem(8))
    (plan,) = workspace_reuse([table], 4 * KIB)
    baseline = here.undivided(table, 4 * KIB)
    here.validate(plan, baseline, time_limit_s=0.0)
    assert here.cache.get_verdict("null", problem(8), signature(plan, baseline)) is None
    here.validate(plan, baseline)
    assert here.cache.get_verdict("null", problem(8), signature(plan, baseline)) < 1.0


def test_only_what_was_asked_for_is_recorded(tmp_path):
    here = Tuner(backend=shaky(4), rule=ROUGH)
    mine, other = problem(16), problem(16, w_shape=(5, 3, 3, 3))
    plans(here, [mine, other])
    file = tmp_path / "r.json"
    record_run(file, here, [mine], [here.measure(mine)], since=0.0)
    found = read_recording(file.read_bytes())
    assert {m.problem.with_batch(16) for m in found.measurements} == {mine}
    assert found.verdicts == tuple(v for v in here.verdicts if v.problem == mine)
    assert len(found.verdicts) < len(here.verdicts)
