"""Planners of micro-batches for one kernel and for a total workspace, by definition."""

import ast
import itertools
import logging
import math
import random
import subprocess
from dataclasses import replace

import pulp
import pytest
from hypothesis import given, strategies as st

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import PerfTable
from mucudnn.passes.convolution.knapsack import (
    Item,
    Selection,
    divide,
    exact,
    ilp,
    reduce_to_core,
)
from mucudnn.passes.convolution.pareto import division_cost_ms
from mucudnn.passes.microbatch import (
    BATCH_POLICIES,
    PLANNERS,
    candidate_batches,
    minimum_workspace,
    pareto_plans,
    undivided,
    workspace_division,
    workspace_division_exact,
    workspace_reuse,
)
from tests.examples import examples
from tests.sources import sources
from tests.tables import divisions, pareto_front, perf, perf_tables, problem

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


def points(table, limit):
    return {(w, c) for w, c, _ in divisions(table, limit)}


def cheapest(tables, limit):
    """The definition: every choice of every division of every kernel."""
    best = {0: 0.0}
    for table in tables:
        sums: dict[int, float] = {}
        for (used, spent), (w, c) in itertools.product(
            best.items(), points(table, limit)
        ):
            if used + w <= limit:
                sums[used + w] = min(spent + c, sums.get(used + w, float("inf")))
        best = sums
    return min(best.values())


def total_cost(plans, tables):
    return sum(
        division_cost_ms(p.steps, t.launch_overhead_ms)
        for p, t in zip(plans, tables, strict=True)
    )


tables_of_any_kind = st.lists(
    st.one_of(perf_tables(max_batch=3), perf_tables(max_batch=4, noisy=True)),
    min_size=1,
    max_size=4,
)


@given(tables_of_any_kind, st.integers(0, 20))
def test_merging_fronts_equals_exhaustive_search(tables, limit):
    plans = workspace_division_exact(tables, limit)
    assert sum(p.workspace for p in plans) <= limit
    assert total_cost(plans, tables) == cheapest(tables, limit)


@examples(30)
@given(tables_of_any_kind, st.integers(0, 20))
def test_ilp_equals_exhaustive_search(tables, limit):
    plans = workspace_division(tables, limit)
    assert sum(p.workspace for p in plans) <= limit
    assert total_cost(plans, tables) == pytest.approx(cheapest(tables, limit))


def fronts(seed, kernels, size, nbytes=1 << 26):
    rng = random.Random(seed)
    groups = []
    for _ in range(kernels):
        workspaces = sorted({0, *(rng.randrange(1, nbytes) for _ in range(size - 1))})
        costs = sorted((rng.uniform(1, 4) for _ in workspaces), reverse=True)
        groups.append([Item(w, c) for w, c in zip(workspaces, costs, strict=True)])
    return groups


def cost_ms(plans):
    return sum(division_cost_ms(plan.steps, 0.0) for plan in plans)


def front_table(group):
    rows = [perf(f"a{i}", 4, cost, w) for i, (w, cost) in enumerate(group)]
    return PerfTable(problem(4), tuple(rows))


@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_ilp_and_merging_agree_on_many_kernels(seed, fraction):
    groups = fronts(seed, 40, 20)
    tables = [front_table(group) for group in groups]
    total = int(fraction * sum(group[-1].workspace for group in groups))
    by_ilp, by_merging = (divide(tables, total, solve) for solve in (ilp, exact))
    assert sum(plan.workspace for plan in by_ilp) <= total
    assert sum(plan.workspace for plan in by_merging) <= total
    assert cost_ms(by_ilp) == pytest.approx(cost_ms(by_merging), rel=1e-9)


@given(st.integers(0, 10**6), st.integers(0, 300))
def test_the_core_keeps_an_optimum_and_the_bound_holds(seed, capacity):
    groups = fronts(seed, 4, 4, nbytes=100)
    core = reduce_to_core(groups, capacity)
    best = min(
        sum(item.cost for item in pick)
        for pick in itertools.product(*groups)
        if sum(item.workspace for item in pick) <= capacity
    )
    assert core.bound <= best + 1e-9
    assert core.cost(exact(core).picks) == pytest.approx(best)
    left = [[core.groups[g][i] for i in items] for g, items in enumerate(core.open)]
    assert best == pytest.approx(
        min(
            sum(item.cost for item in pick)
            for pick in itertools.product(*left)
            if sum(item.workspace for item in pick) <= core.capacity
        )
    )


@examples(30)
@given(st.integers(0, 10**6), st.integers(0, 300))
def test_ilp_solves_what_was_not_reduced(seed, capacity):
    groups = fronts(seed, 4, 4, nbytes=100)
    core = reduce_to_core(groups, capacity)
    whole = replace(core, open=tuple(tuple(range(len(g))) for g in core.groups))
    selection = ilp(whole)
    assert selection.optimal
    assert core.workspace(selection.picks) <= core.capacity
    assert core.cost(selection.picks) == pytest.approx(core.cost(exact(core).picks))


def test_merging_that_runs_out_of_effort_is_nearly_as_good():
    tables, total = hard()

    def hasty(core):
        return exact(core, effort=1, most_effort=2)

    cut, best = divide(tables, total, hasty), divide(tables, total, exact)
    assert sum(plan.workspace for plan in cut) <= total
    assert cost_ms(best) <= cost_ms(cut) < 1.05 * cost_ms(best)


def hard():
    """Tables and a total that the linear relaxation alone does not settle."""
    groups = fronts(0, 12, 8)
    tables = [front_table(group) for group in groups]
    total = sum(group[-1].workspace for group in groups) // 3
    assert not reduce_to_core(groups, total).closed
    return tables, total


def no_solution(core):
    return None


def greedy_overspender(core):
    return Selection(tuple(len(group) - 1 for group in core.groups), optimal=True)


def broken(error):
    """CBC, where it cannot be run."""

    def fail(self, model, **options):
        raise error

    def solve(core):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pulp.PULP_CBC_CMD, "actualSolve", fail)
            return ilp(core)

    solve.__name__ = str(error)
    return solve


def stopped(core):
    return Selection(core.incumbent, optimal=False)


@pytest.mark.parametrize(
    "solver",
    [
        no_solution,
        greedy_overspender,
        broken(pulp.PulpSolverError("no cbc")),
        broken(OSError("no disk")),
    ],
)
def test_a_failing_solver_is_replaced(solver, caplog):
    tables, total = hard()
    best = divide(tables, total, exact)
    with caplog.at_level(logging.WARNING):
        assert divide(tables, total, solver) == best
    assert solver.__name__ in caplog.text
    early = divide(tables, total, stopped)  # feasible
    assert sum(plan.workspace for plan in early) <= total
    assert cost_ms(early) >= cost_ms(best)


def test_no_plan_depends_on_a_clock(monkeypatch):
    """A tree of so many nodes, searched by one thread from one seed."""
    started, original = [], subprocess.Popen

    def spy(args, *rest, **options):
        started.append(args)
        return original(args, *rest, **options)

    monkeypatch.setattr(subprocess, "Popen", spy)
    tables, total = hard()
    assert workspace_division(tables, total) == workspace_division(tables, total)
    assert len(started) >= 2
    for command in started:
        options = dict(itertools.pairwise(command))
        assert not {"-sec", "-seconds"} & set(command)
        assert int(options["-maxNodes"]) > 0
        assert options["-threads"] == "1"
        assert {"-randomSeed", "-randomCbcSeed"} < set(options)


def test_a_program_that_is_not_reduced_ends_by_its_nodes():
    """Hundreds of variables and few nodes: it stops, with the same answer each time."""
    groups = fronts(2, 60, 30)
    capacity = sum(group[-1].workspace for group in groups) // 3
    core = reduce_to_core(groups, capacity)
    everything = tuple(tuple(range(len(group))) for group in groups)
    core = replace(core, open=everything)
    first, second = (ilp(core, most_nodes=1) for _ in range(2))
    assert first == second
    assert core.workspace(first.picks) <= core.capacity
    assert core.cost(first.picks) >= core.bound - 1e-9


def test_passes_look_at_no_clock():
    for module, tree in sources().items():
        for node in ast.walk(tree) if "passes" in module.split(".") else ():
            names = [alias.name for alias in getattr(node, "names", ())]
            names += [getattr(node, "module", None)]
            assert not {"time", "datetime"} & set(names), module


def test_equal_tables_are_examined_once(monkeypatch):
    tables, _ = hard()
    seen = []
    from mucudnn.passes.convolution import knapsack

    original = knapsack.pareto_front
    monkeypatch.setattr(
        knapsack, "pareto_front", lambda t, limit: seen.append(t) or original(t, limit)
    )
    divide([tables[0]] * 5 + tables, 1 << 28, exact)
    assert len(seen) == len(tables)


def test_exactly_enough_and_one_byte_less():
    tables = [
        PerfTable(problem(1), (perf("A", 1, 2.0, need), perf("B", 1, 1.0, 50)))
        for need in (10, 20, 30)
    ]
    for planner in (workspace_division, workspace_division_exact):
        assert [p.workspace for p in planner(tables, 60)] == [10, 20, 30]
        with pytest.raises(PlanningError, match=r"59 bytes.*need 60 bytes, 1 more"):
            planner(tables, 59)
    # Too little even for one kernel alone.
    with pytest.raises(PlanningError, match="need 60 bytes, 55 more"):
        workspace_division(tables, 5)


def test_everything_fits():
    tables = [PerfTable(problem(1), (perf("A", 1, 2.0, 0), perf("B", 1, 1.0, 50)))] * 3
    plans = divide(tables, 150, no_solution)
    assert sum(plan.workspace for plan in plans) == 150
    assert cost_ms(plans) == 3.0
    assert divide([], 0, exact) == ()
