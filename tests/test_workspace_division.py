import ast
import itertools
import logging
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pulp
import pytest
from hypothesis import given, strategies as st

import mucudnn
from mucudnn.errors import PlanningError
from mucudnn.ir.conv import PerfTable
from mucudnn.passes.convolution.knapsack import (
    SOLVERS,
    Item,
    Selection,
    divide,
    exact,
    ilp,
    reduce_to_core,
)
from mucudnn.passes.microbatch import (
    plan_cost_ms,
    workspace_division,
    workspace_division_exact,
)
from tests.examples import examples
from tests.tables import divisions, perf, perf_tables, problem


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
        plan_cost_ms(p, t.launch_overhead_ms)
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


def front_table(group):
    rows = [perf(f"a{i}", 4, cost, w) for i, (w, cost) in enumerate(group)]
    return PerfTable(problem(4), tuple(rows))


@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_ilp_and_merging_agree_on_many_kernels(seed, fraction):
    groups = fronts(seed, 40, 20)
    tables = [front_table(group) for group in groups]
    total = int(fraction * sum(group[-1].workspace for group in groups))
    by_ilp, by_merging = (divide(tables, total, solver=s) for s in ("ilp", "exact"))
    assert by_ilp.workspace <= total
    assert by_merging.workspace <= total
    assert by_ilp.status == by_merging.status == "optimal"
    assert by_ilp.cost_ms == pytest.approx(by_merging.cost_ms, rel=1e-9)
    assert by_ilp.gap == by_merging.gap == 0


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


def test_merging_that_runs_out_of_effort_states_its_gap():
    tables, total = hard()

    def hasty(core):
        return exact(core, effort=1, most_effort=2)

    cut = divide(tables, total, solver=hasty)
    assert (cut.status, cut.solver) == ("feasible", "hasty")
    assert cut.workspace <= total
    assert 0 < cut.gap < 0.05
    best = divide(tables, total, solver="exact")
    assert best.status == "optimal"
    assert cut.lower_bound_ms <= best.cost_ms <= cut.cost_ms


def hard():
    """Tables and a total that the linear relaxation alone does not settle."""
    groups = fronts(0, 12, 8)
    tables = [front_table(group) for group in groups]
    total = sum(group[-1].workspace for group in groups) // 3
    assert divide(tables, total, solver="exact").solver == "exact"
    return tables, total


def no_solution(core):
    return None


def greedy_overspender(core):
    return Selection(tuple(len(group) - 1 for group in core.groups), optimal=True)


@pytest.mark.parametrize("solver", [no_solution, greedy_overspender])
def test_a_failing_solver_is_replaced(solver, caplog):
    tables, total = hard()
    with caplog.at_level(logging.WARNING):
        division = divide(tables, total, solver=solver)
    assert solver.__name__ in caplog.text
    assert division == divide(tables, total, solver="exact")


@pytest.mark.parametrize("error", [pulp.PulpSolverError("no cbc"), OSError("no disk")])
def test_a_solver_that_cannot_be_run_is_replaced(error, monkeypatch, caplog):
    def fail(self, model, **options):
        raise error

    tables, total = hard()
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", fail)
    with caplog.at_level(logging.WARNING):
        plans = workspace_division(tables, total)
    assert str(error) in caplog.text
    assert plans == divide(tables, total, solver="exact").plans


def commands(monkeypatch):
    """What solvers are started with."""
    started, original = [], subprocess.Popen

    def spy(args, *rest, **options):
        started.append(args)
        return original(args, *rest, **options)

    monkeypatch.setattr(subprocess, "Popen", spy)
    return started


def check(command):
    """A tree of so many nodes, searched by one thread from one seed, by no clock."""
    options = dict(itertools.pairwise(command))
    assert not {"-sec", "-seconds"} & set(command)
    assert int(options["-maxNodes"]) > 0
    assert options["-threads"] == "1"
    assert {"-randomSeed", "-randomCbcSeed"} < set(options)


def test_no_plan_depends_on_a_clock(monkeypatch):
    started = commands(monkeypatch)
    tables, total = hard()
    assert workspace_division(tables, total) == workspace_division(tables, total)
    assert len(started) >= 2
    for command in started:
        check(command)


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
    folder = Path(mucudnn.__file__).parent / "passes"
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in getattr(node, "names", ())]
            names += [getattr(node, "module", None)]
            assert not {"time", "datetime"} & set(names), file


def test_a_solver_stopped_early_is_feasible_with_a_gap():
    tables, total = hard()

    def stopped(core):
        return Selection(core.incumbent, optimal=False)

    division = divide(tables, total, solver=stopped)
    assert (division.status, division.solver) == ("feasible", "stopped")
    assert division.lower_bound_ms <= divide(tables, total, solver="exact").cost_ms
    assert division.gap >= 0


def test_equal_tables_are_examined_once(monkeypatch):
    tables, _ = hard()
    seen = []
    from mucudnn.passes.convolution import knapsack

    original = knapsack.pareto_front
    monkeypatch.setattr(
        knapsack, "pareto_front", lambda t, limit: seen.append(t) or original(t, limit)
    )
    divide([tables[0]] * 5 + tables, 1 << 28)
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
    division = divide(tables, 150)
    assert (division.workspace, division.time_ms, division.gap) == (150, 3.0, 0.0)
    assert (division.solver, division.status) == ("relaxation", "optimal")
    assert divide([], 0).plans == ()


def test_bad_arguments():
    with pytest.raises(ValueError, match="exact, ilp"):
        divide([], 1, solver="glpk")
    assert set(SOLVERS.table) == {"ilp", "exact"}
