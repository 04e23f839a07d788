import math

import pytest
from hypothesis import given, strategies as st

from mucudnn.ir.conv import PerfTable
from mucudnn.passes.convolution.pruning import next_measurements
from mucudnn.passes.microbatch import candidate_batches, pareto_plans
from tests.tables import perf, problem, realistic_table

ANY = 1 << 60


def measure(table, **options):
    """Drive pruning as a tuner does, with `table` as the machine."""
    rows = {(p.algo, p.batch): p for p in table.perfs}
    workspaces = {point: p.workspace for point, p in rows.items()}
    sizes = candidate_batches(table.problem.batch, "all")
    measured = {}
    while todo := next_measurements(
        sizes, workspaces, tuple(measured.values()), **options
    ):
        assert not set(todo) & set(measured)
        assert list(todo) == sorted(set(todo), key=lambda point: (-point[1], point[0]))
        measured |= {point: rows[point] for point in todo}
    return PerfTable(table.problem, tuple(measured.values()), table.launch_overhead_ms)


def loss(full, pruned, clean):
    """Worst and mean slowdown over the limits where the exhaustive front changes.

    Times are those of `clean`: an exhaustive search over noisy measurements also
    finds the luckiest ones, which is no gain when the plan runs.
    """
    times = {(p.algo, p.batch): p.time_ms for p in clean.perfs}

    def truth(plan):
        return sum(times[s.algo, s.batch] for s in plan.steps)

    available = pareto_plans(pruned, ANY)
    slowdowns = []
    for best in pareto_plans(full, ANY):
        within = [p for p in available if p.workspace <= best.workspace]
        assert within, "no plan at a limit where there is one"
        slowdowns.append(truth(within[-1]) / truth(best) - 1)
    return max(slowdowns), sum(slowdowns) / len(slowdowns)


@pytest.mark.parametrize("shape", ["affine", "waves", "sweet"])
@pytest.mark.parametrize(
    ("batch", "algos", "seeds", "noise", "share", "most"),
    [
        pytest.param(256, 8, (0, 1), 0.0, 0.2, 0.02, marks=pytest.mark.slow),
        (128, 7, (0, 1), 0.0, 0.2, 0.02),
        # A time that is two standard deviations off misleads any planner by as much.
        (128, 7, (3,), 0.02, 0.2, 0.06),
        (8, 6, range(5), 0.02, 0.99, 0.02),
    ],
)
def test_few_measurements_suffice_for_every_limit(
    shape, batch, algos, seeds, noise, share, most
):
    for seed in seeds:
        full, clean = realistic_table(seed, batch, algos, shape, noise=noise)
        pruned = measure(full)
        assert len(pruned.perfs) <= share * len(full.perfs)
        worst, mean = loss(full, pruned, clean)
        assert worst <= most
        assert mean <= 0.01


times = st.one_of(st.integers(0, 20), st.floats(0, 1e6), st.just(math.inf))


@given(st.data(), st.integers(1, 12), st.sampled_from([0.0, 0.5]))
def test_any_machine_ends_with_a_plan_where_there_is_one(data, batch, launch):
    rows = []
    for algo in ("GEMM", "FFT"):
        for b in range(1, batch + 1):
            time_ms, nbytes = data.draw(times), data.draw(st.integers(0, 9))
            error = "no" if time_ms == math.inf else None
            rows.append(perf(algo, b, time_ms, nbytes, error=error))
    full = PerfTable(problem(batch), tuple(rows), launch)
    pruned = measure(full, launch_overhead_ms=launch)
    assert {p for p in pruned.perfs if p.batch == batch}
    usable = [p for p in pruned.perfs if p.error is None and p.batch == 1]
    assert bool(pareto_plans(pruned, ANY)) >= bool(usable)


def test_what_fails_is_hopeless_or_known_is_asked_for_at_few_sizes():
    batch = 64
    rows = [perf("GEMM", b, 0.1 + b, 0) for b in range(1, batch + 1)]
    rows += [
        perf("BROKEN", b, math.inf, 10, error="not supported")
        for b in range(1, batch + 1)
    ]
    pruned = measure(PerfTable(problem(batch), tuple(rows)))
    asked = {p.batch for p in pruned.perfs if p.algo == "BROKEN"}
    assert asked == {1, 2, 4, 8, 16, 32, 64}
    full, _ = realistic_table(0, 64, 3, "affine")
    slow = tuple(perf("SLOW", b, 100.0 + 10 * b, 1 << 40) for b in range(1, 65))
    pruned = measure(PerfTable(full.problem, full.perfs + slow))
    assert {p.batch for p in pruned.perfs if p.algo == "SLOW"} <= {1, 2, 4, 8}
    full, _ = realistic_table(0, 32, 4, "waves")
    workspaces = {(p.algo, p.batch): p.workspace for p in full.perfs}
    sizes = range(1, 33)
    assert next_measurements(sizes, workspaces, full.perfs) == ()
    first = next_measurements(sizes, workspaces, ())
    assert {batch for _, batch in first} == {1}


def test_sizes_without_powers_of_two_have_anchors_too():
    rows = [perf("A", n, 1.0 * n, 0) for n in (3, 6, 9, 10)]
    workspaces = {(p.algo, p.batch): p.workspace for p in rows}
    measured, asked = [], []
    while todo := next_measurements((10, 3, 6, 9), workspaces, measured):
        asked.append([batch for _, batch in todo])
        measured += [row for row in rows if row.batch in asked[-1]]
    assert asked == [[3], [6], [10], [9]]
