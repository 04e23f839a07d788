import math

import pytest
from hypothesis import given, strategies as st

from mucudnn.ir.conv import ConvPlan, PerfTable
from mucudnn.passes.convolution.explain import Trial, explain
from mucudnn.passes.microbatch import pareto_plans, undivided, workspace_reuse
from tests.tables import perf, perf_tables, problem

MIB = 1 << 20

TABLE = PerfTable(
    problem(256),
    (
        perf("GEMM", 256, 4.0, 0),
        perf("FFT", 256, 1.2, int(93.1 * MIB)),
        perf("FFT", 128, 1.0, 50 * MIB),
        perf("FFT", 64, 0.8, 30 * MIB),
        perf("WINOGRAD", 256, math.inf, 0, error="a filter of 7\nis too large " * 20),
        perf("WINOGRAD", 64, math.inf, 0, error="a filter of 7\nis too large " * 20),
        perf("TILING", 256, math.inf, 0, error="stride 2"),
    ),
)


def test_a_divided_plan():
    (plan,) = workspace_reuse([TABLE], 64 * MIB)
    text = explain(TABLE, plan, 64 * MIB)
    assert "with at most 64.0 MiB of workspace" in text
    assert "Undivided, GEMM takes 4 ms with no workspace" in text
    assert "2 micro-batches in 2 ms and 50.0 MiB, 2.00× as fast as undivided" in text
    assert "2 × 128 samples by FFT, 1 ms each, 50.0 MiB" in text
    assert (
        "FFT would take 1.2 ms undivided but needs 93.1 MiB, 29.1 MiB over the limit"
        in text
    )
    assert "Larger limits would allow: 93.1 MiB → 1.2 ms (3.33×)" in text


def test_failures_are_grouped_and_shortened():
    (plan,) = undivided([TABLE], 0)
    text = explain(TABLE, plan, 0)
    assert "does not divide: GEMM takes 4 ms with no workspace" in text
    assert "TILING cannot run at 256 samples: stride 2" in text
    (line,) = (line for line in text.splitlines() if "WINOGRAD" in line)
    assert "at 2 sizes from 64 to 256: a filter of 7 is too large" in line
    assert line.endswith("…")
    assert len(line) < 200


def test_at_the_best_limit_nothing_more_can_be_bought():
    (plan,) = workspace_reuse([TABLE], 100 * MIB)
    text = explain(TABLE, plan, 100 * MIB)
    assert "does not divide: FFT takes 1.2 ms" in text
    assert "would not make it notably faster" in text
    assert "over the limit" not in text


def test_one_byte_less():
    table = PerfTable(problem(2), (perf("A", 2, 1.0, 100), perf("B", 1, 1.0, 10)))
    (plan,) = workspace_reuse([table], 99)
    text = explain(table, plan, 99)
    assert "Undivided, no algorithm fits: the smallest needs 100 B" in text
    assert "A would take 1 ms undivided but needs 100 B, 1 B over the limit" in text


def test_times_of_zero_are_no_obstacle():
    table = PerfTable(problem(2), (perf("A", 1, 0.0, 0), perf("B", 2, 1.0, 5)))
    (plan,) = workspace_reuse([table], 5)
    assert explain(table, plan, 5)


@given(perf_tables(noisy=True), st.integers(0, 9), st.integers(0, 9))
def test_every_table_and_plan_can_be_explained(table, limit, other):
    plans = [*workspace_reuse([table], limit), *undivided([table], limit)]
    for plan in [*plans, *pareto_plans(table, 8)]:
        text = explain(table, plan, other)
        assert all(step.algo in text for step in plan.steps)
        for failed in (p for p in table.perfs if p.error):
            assert f"{failed.algo} cannot run" in text


@pytest.mark.parametrize("points", [3, 40])
def test_long_fronts_are_shortened(points):
    rows = [perf(f"a{i}", 4, 2.0**-i, i) for i in range(points)]
    table = PerfTable(problem(4), tuple(rows))
    text = explain(table, undivided([table], 0)[0], 0)
    (line,) = (line for line in text.splitlines() if "would allow" in line)
    assert line.count("→") == min(points - 1, 6)
    assert f"{points - 1} B →" in line


def test_a_plan_is_explained_by_the_limit_it_was_made_under():
    for limit in (0, 30 * MIB, 64 * MIB, 100 * MIB):
        for plan in (*workspace_reuse([TABLE], limit), *undivided([TABLE], limit)):
            assert plan.workspace_limit == limit
            assert explain(TABLE, plan) == explain(TABLE, plan, limit)
    (plan,) = workspace_reuse([TABLE], 64 * MIB)
    by_hand = ConvPlan(plan.problem, plan.steps)
    assert by_hand == plan
    assert by_hand.workspace_limit is None
    assert "with at most 50.0 MiB of workspace" in explain(TABLE, by_hand)


def test_a_ratio_is_of_one_run_where_there_was_one():
    (plan,) = workspace_reuse([TABLE], 64 * MIB)
    text = explain(TABLE, plan, trial=Trial(plan, 0.8))
    assert "1.25× as fast as undivided when run together, 2.00× from per-kernel" in text
    text = explain(TABLE, plan)
    assert "2.00× as fast as undivided from per-kernel timings" in text
    assert "not run together" in text
    text = explain(TABLE, plan, trial=Trial(plan, 1.0))
    assert "not faster than undivided when run together, 2.00× from per-kernel" in text


def test_a_division_that_did_not_win_is_spoken_of():
    (plan,) = undivided([TABLE], 64 * MIB)
    (division,) = workspace_reuse([TABLE], 64 * MIB)
    text = explain(TABLE, plan, trial=Trial(division, 1.0))
    assert (
        "A division into 2 × 128 by FFT was not faster than undivided when run "
        "together, 2.00× from per-kernel timings" in text
    )
    assert "A division" not in explain(TABLE, plan, trial=Trial(division))


def test_a_plan_of_other_measurements_is_not_passed_off_as_one_of_these():
    other = PerfTable(TABLE.problem, (perf("OTHER", 256, 1.0, 0),))
    (plan,) = undivided([other], 0)
    assert "based on other measurements" in explain(TABLE, plan)
