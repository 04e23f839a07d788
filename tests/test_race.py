"""What is not worth timing is known from smaller sizes, and never costs a plan."""

import math

import pytest
from hypothesis import given, strategies as st

from mucudnn.ir.conv import PerfTable
from mucudnn.ir.measurement import ANY_LIMIT, LimitRange
from mucudnn.ir.numerics import RowStatus
from mucudnn.passes.convolution.pruning import race
from mucudnn.passes.microbatch import candidate_batches, pareto_plans
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.tuner import Tuner
from tests.doubles import QUICK, problem, watched
from tests.examples import examples
from tests.tables import perf

SIZES = candidate_batches(64, "powers_of_two")


def run(rows, sizes=SIZES, limits=ANY_LIMIT):
    """Rows that a race asks for, in order, and the points that it leaves out."""
    rows = {(p.algo, p.batch): p for p in rows}
    workspaces = {point: p.workspace for point, p in rows.items()}
    asked = []
    while (now := race(sizes, workspaces, asked, limits=limits)).points:
        assert not {*now.points[0]} & {(p.algo, p.batch) for p in asked}
        asked += [rows[point] for point in now.points[0]]
    assert {*rows} == {*now.hopeless, *((p.algo, p.batch) for p in asked)}
    return asked, now.hopeless


def law(algo, start, slope, nbytes, sizes=SIZES, **more):
    return [perf(algo, b, start + slope * b, nbytes(b), **more) for b in sizes]


def test_a_hopeless_algorithm_is_not_timed_at_larger_sizes():
    rows = law("FAST", 0.1, 1, lambda b: 0) + law("SLOW", 0, 50, lambda b: 9)
    asked, hopeless = run(rows)
    assert [p.batch for p in asked if p.algo == "SLOW"] == [1, 2]
    assert {*hopeless.values()} == {"FAST"}


def test_what_alone_fits_the_limit_is_timed():
    rows = law("FAST", 0, 1, lambda b: 1000 * b) + law("SLOW", 0, 50, lambda b: 0)
    assert run(rows)[1] == {}
    assert run(rows, limits=LimitRange(999))[1] == {}
    for limit in (16_000, 64_000):
        _, hopeless = run(rows, limits=LimitRange(limit))
        assert {b for _, b in hopeless} == {
            b for b in (4, 8, 16, 32, 64) if 1000 * b <= limit
        }


def test_a_start_that_many_samples_share_is_forgiven():
    rows = law("FAST", 0, 1, lambda b: 0) + law("FFT", 30, 0.2, lambda b: 9)
    asked, _ = run(rows)
    assert {p.batch for p in asked if p.algo == "FFT"} >= {32, 64}


def test_more_than_any_limit_is_timed_only_where_it_may_be_faster():
    rows = law("FITS", 0.1, 1, lambda b: 0) + law("SLOWER", 0, 1.5, lambda b: 9 * b)
    rows += law("FASTER", 0, 0.5, lambda b: 9 * b)
    asked, hopeless = run(rows, limits=LimitRange(0, 99))
    timed = {
        algo: {p.batch for p in asked if p.algo == algo}
        for algo in ("SLOWER", "FASTER")
    }
    assert timed == {"SLOWER": {1, 2, 4, 8}, "FASTER": {*SIZES}}
    assert {algo for algo, _ in hopeless} == {"SLOWER"}
    every = [row for row in rows if row.algo != "FASTER"]
    assert run(every)[1] == {}, "where there may be such a limit all are timed"


def test_a_size_in_between_is_timed_before_a_vague_guess_is_tried_on_all_samples():
    rows = law("FAST", 0, 1, lambda b: 0)
    rows += [
        perf("VAGUE", b, t, 9)
        for b, t in zip(SIZES, (30, 30, 50, 90, 170, 330, 650), strict=True)
    ]
    asked, hopeless = run(rows)
    assert [p.batch for p in asked if p.algo == "VAGUE"] == [1, 2, 8]
    assert ("VAGUE", 64) in hopeless


def test_what_fails_is_ahead_of_nobody():
    rows = law("SLOW", 0, 50, lambda b: 9)
    for row in law("FAST", 0.1, 1, lambda b: 0):
        if row.batch < 64:
            rows.append(row)
        else:
            rows.append(perf("FAST", 64, math.inf, 0, error="RuntimeError: no"))
    asked, hopeless = run(rows)
    assert ("SLOW", 64) in {(p.algo, p.batch) for p in asked}
    assert ("SLOW", 32) in hopeless


@given(st.data(), st.sampled_from([1, 2, 7, 16, 64]), st.integers(0, 40))
@examples(200)
def test_no_plan_is_lost_where_times_follow_a_law(data, batch, least_limit):
    sizes, rows = candidate_batches(batch, "powers_of_two"), []
    for algo in "ABCD"[: data.draw(st.integers(1, 4))]:
        start, slope = data.draw(st.floats(0, 50)), data.draw(st.floats(0.01, 50))
        fixed, each = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 3))
        rows += law(algo, start, slope, lambda b, f=fixed, e=each: f + e * b, sizes)
    asked, _ = run(rows, sizes, LimitRange(least_limit))
    some, every = (PerfTable(problem(batch), tuple(r), 0.0) for r in (asked, rows))
    for plan in pareto_plans(every, 1 << 40):
        limit = max(plan.workspace, least_limit)
        best = pareto_plans(every, limit)[-1].time_ms
        assert pareto_plans(some, limit)[-1].time_ms == pytest.approx(best)


def slowed():
    """The null library, one of whose algorithms takes fifty times as long."""

    def before(problem, algo):
        if algo == "SLOW":
            backend.device.advance(49 * problem.batch)

    backend = watched(before=before)
    return backend


def test_rows_not_timed_say_so_and_another_limit_asks_for_them():
    backend, cache = slowed(), BenchmarkCache()
    one = Tuner(backend=backend, rule=QUICK, cache=cache)
    table = one.measure(problem(64), limits=LimitRange(1 << 30))
    left_out = {p for p in table.perfs if p.status is RowStatus.HOPELESS}
    assert {(p.algo, p.batch) for p in left_out} >= {("SLOW", 32), ("SLOW", 64)}
    assert all("FAST is far ahead" in p.error for p in left_out)
    assert len(table.perfs) == 2 * len(SIZES)
    assert ("SLOW", 64) not in backend.conv.calls
    assert not {(p.algo, p.batch) for p in left_out} & {
        (row.perf.algo, row.perf.batch) for row in cache.rows()
    }
    for limit in (0, 1 << 30):
        (plan,) = one.planner(
            [one.measure(problem(64), limits=LimitRange(limit))], limit
        )
        assert {step.algo for step in plan.steps} == {"FAST" if limit else "SLOW"}
    calls = len(backend.conv.calls)
    full = one.measure(problem(64))
    assert not any(p.error for p in full.perfs)
    assert one.measure(problem(64), limits=LimitRange(1 << 30)) == full
    assert len(backend.conv.calls) == calls, "what is known serves every limit"


def test_without_pruning_everything_is_timed():
    table = Tuner(backend=slowed(), rule=QUICK, cache=None, prune=False).measure(
        problem(64), limits=LimitRange(1 << 30)
    )
    assert not any(p.error for p in table.perfs)
