import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import PerfTable
from mucudnn.passes.convolution.pareto import division_cost_ms
from mucudnn.passes.microbatch import (
    BATCH_POLICIES,
    PLANNERS,
    candidate_batches,
    minimum_workspace,
    pareto_plans,
    undivided,
    workspace_reuse,
)
from tests.tables import (
    divisions,
    pareto_front,
    perf,
    perf_tables,
    problem,
)

limits = st.integers(0, 9)


@given(st.one_of(perf_tables(), perf_tables(noisy=True)), limits)
def test_workspace_reuse_equals_exhaustive_search(table, limit):
    (plan,) = workspace_reuse([table], limit)
    best = min((c, len(steps), w) for w, c, steps in divisions(table, limit))
    cost = division_cost_ms(plan.steps, table.launch_overhead_ms)
    assert (cost, len(plan.steps), plan.workspace) == best
    assert set(plan.steps) <= set(table.usable)


@given(perf_tables(integers=False), limits)
def test_workspace_reuse_is_optimal_for_any_times(table, limit):
    (plan,) = workspace_reuse([table], limit)
    assert plan.workspace <= limit
    assert plan.time_ms == pytest.approx(min(c for _, c, _ in divisions(table, limit)))


@given(st.one_of(perf_tables(), perf_tables(noisy=True)), limits)
def test_pareto_plans_are_the_front(table, limit):
    plans = pareto_plans(table, limit)
    launch = table.launch_overhead_ms
    front = [(p.workspace, division_cost_ms(p.steps, launch)) for p in plans]
    every = list(divisions(table, limit))
    assert front == sorted(pareto_front({(w, c) for w, c, _ in every}))
    for plan, point in zip(plans, front, strict=True):
        fewest = min(len(steps) for w, c, steps in every if (w, c) == point)
        assert len(plan.steps) == fewest


@given(perf_tables(noisy=True), limits, st.sampled_from([0.0, 0.05, 0.5]))
def test_minimum_workspace(table, limit, slowdown):
    (plan,) = minimum_workspace([table], limit, slowdown)
    every = [(w, c) for w, c, _ in divisions(table, limit)]
    allowed = (1 + slowdown) * min(c for _, c in every)
    assert plan.workspace == min(w for w, c in every if c <= allowed)
    assert division_cost_ms(plan.steps, table.launch_overhead_ms) <= allowed


@pytest.mark.parametrize("name", sorted(PLANNERS.table))
@given(tables=st.lists(perf_tables(max_batch=4), max_size=3))
def test_every_planner_plans_every_table_in_order_within_the_limit(name, tables):
    plans = PLANNERS.resolve(name)(tables, 6)
    assert [p.problem for p in plans] == [t.problem for t in tables]
    assert all(plan.workspace <= 6 for plan in plans)


def test_launch_overhead_and_noise_count_against_dividing():
    def parts(table, **changes):
        return len(workspace_reuse([replace(table, **changes)], 0)[0].steps)

    rows = (perf("A", 1, 1.0, 0), perf("A", 2, 2.5, 0))
    table = PerfTable(problem(2), rows)
    assert parts(table) == 2
    assert parts(table, launch_overhead_ms=1.0) == 1
    assert parts(table, perfs=(replace(rows[0], noise_ms=0.3), rows[1])) == 1
    # Ties go to fewer parts, even where tenths add up unevenly.
    rows = tuple(perf("A", b, 0.1 * b, 0) for b in (1, 2, 4, 8))
    assert parts(PerfTable(problem(8), rows)) == 1


@pytest.mark.parametrize(
    ("batch", "policy", "sizes"),
    [
        (6, "undivided", (6,)),
        (6, "powers_of_two", (1, 2, 4, 6)),
        (8, "powers_of_two", (1, 2, 4, 8)),
        (1, "powers_of_two", (1,)),
        (3, "all", (1, 2, 3)),
    ],
)
def test_candidate_batches(batch, policy, sizes):
    assert candidate_batches(batch, policy) == sizes


@given(st.integers(1, 300), st.sampled_from(sorted(BATCH_POLICIES.table)))
def test_candidate_batches_end_with_the_whole_batch(batch, policy):
    sizes = candidate_batches(batch, policy)
    assert sizes[-1] == batch
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[0] >= 1


def test_unknown_names_list_the_choices_and_a_batch_is_not_empty():
    with pytest.raises(ValueError, match="all, powers_of_two, undivided"):
        candidate_batches(4, "powerOfTwo")
    with pytest.raises(ValueError, match="the mini-batch must be at least 1, got 0"):
        candidate_batches(0, "all")
    with pytest.raises(ValueError, match="undivided, workspace_division"):
        PLANNERS.resolve("magic")
    assert PLANNERS.resolve(undivided) is undivided


@pytest.mark.parametrize("name", ["undivided", "workspace_reuse", "minimum_workspace"])
def test_one_byte_less_says_what_is_missing(name):
    table = PerfTable(problem(1), (perf("GEMM", 1, 1.0, 9),))
    assert PLANNERS.resolve(name)([table], 9)[0].workspace == 9
    with pytest.raises(
        PlanningError, match=r"\(1, 1, 4, 4\).* 8 bytes.*smallest needs 9"
    ):
        PLANNERS.resolve(name)([table], 8)


def test_the_smallest_need_is_that_of_a_division():
    rows = (perf("A", 4, 1.0, 100), perf("A", 3, 1.0, 7), perf("A", 1, 1.0, 9))
    table = PerfTable(problem(4), rows)
    with pytest.raises(PlanningError, match="smallest needs 9"):
        workspace_reuse([table], 8)
    with pytest.raises(PlanningError, match="smallest needs 100"):
        undivided([table], 8)
    assert pareto_plans(table, 8) == ()


@pytest.mark.parametrize("name", sorted(PLANNERS.table))
@pytest.mark.parametrize(
    ("batch", "rows", "message"),
    [
        (
            2,
            [("FFT", 2, "filter too large"), ("WINOGRAD", 2, "stride 2")],
            "FFT: filter too large; WINOGRAD: stride 2",
        ),
        (2, [], "nothing was measured"),
        (5, [("A", 2, None), ("A", 4, None)], "sizes 2, 4, which do not make up its 5"),
    ],
)
def test_why_nothing_is_planned_is_told(name, batch, rows, message):
    rows = (
        perf(algo, size, math.inf if error else 1.0, 0, error=error)
        for algo, size, error in rows
    )
    with pytest.raises(PlanningError, match=message):
        PLANNERS.resolve(name)([PerfTable(problem(batch), tuple(rows))], 10)


def test_infinite_and_oversized_rows_are_never_chosen():
    rows = (
        perf("A", 2, math.inf, 0),
        perf("B", 2, math.nan, 0),
        perf("C", 4, 0.1, 0),
        perf("D", 2, 5.0, 3),
    )
    (plan,) = workspace_reuse([PerfTable(problem(2), rows)], 10)
    assert plan.steps == rows[3:]
