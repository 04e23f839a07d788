"""Shares of a mini-batch: exhaustive search, an ILP, bounds, memory, drift."""

import itertools
import random

import pulp
import pytest
from hypothesis import example, given, settings, strategies as st

from mucudnn.errors import PlanningError
from mucudnn.ir.fleet import AllReduce, Fleet, Rank, StepPoint, StepTable
from mucudnn.passes.linear_program import cbc
from mucudnn.passes.load_balancing import (
    ShareTimes,
    best_batch,
    equal_shares,
    plan_of,
    proportional_shares,
    replanned,
    share_times,
    split_batch,
    step_bound_ms,
)
from tests.tables import step_times


def a_table(name, *points):
    return StepTable(name, tuple(StepPoint(*point) for point in points))


def linear(name, fixed, each, most, **rank):
    table = a_table(name, (1, fixed + each), (most, fixed + each * most))
    return Rank(name, table, **rank)


@st.composite
def ranks(draw, most=12):
    points, time_ms, nbytes = [], 0.0, 100
    sizes = draw(st.sets(st.integers(1, most), min_size=1, max_size=4))
    for samples in sorted(sizes):
        # Times may fall, as measured ones do.
        time_ms = max(0.125, time_ms + draw(st.integers(-4, 24)) / 8)
        nbytes += draw(st.integers(0, 300))
        points.append(StepPoint(samples, time_ms, nbytes))
    memory = draw(st.none() | st.integers(100, 1200))
    return Rank("r", StepTable("d", tuple(points)), memory, draw(st.booleans()))


def of_all(fleet, batch, at_least):
    """The least time of a step by trying everything; None if nothing fits."""
    times = [share_times(rank, batch).times_ms for rank in fleet.ranks]
    sizes = [range(at_least, len(of)) for of in times]
    found = [
        max(of[n] for of, n in zip(times, shares, strict=True))
        for shares in itertools.product(*sizes)
        if sum(shares) == batch
    ]
    return min(found) + fleet.all_reduce_ms if found else None


def by_ilp(fleet, batch):
    times = [share_times(rank, batch).times_ms for rank in fleet.ranks]
    program = pulp.LpProblem("split", pulp.LpMinimize)
    longest = pulp.LpVariable("longest", lowBound=0)
    program += longest
    total = []
    for i, of in enumerate(times):
        x = [program.add_variable(f"x_{i}_{n}", cat="Binary") for n in range(len(of))]
        program += pulp.lpSum(x) == 1
        program += longest >= pulp.lpSum(t * v for t, v in zip(of, x, strict=True))
        total += [n * v for n, v in enumerate(x)]
    program += pulp.lpSum(total) == batch
    program.solve(cbc(10_000))
    return pulp.value(longest) + fleet.all_reduce_ms


FALLING = Rank("r", a_table("d", (1, 0.75), (3, 0.5), (5, 0.875), (6, 1.25)))
"""Of shares of two steps, the one after a flat part has the highest throughput."""


@given(ranks(), st.integers(1, 30))
@example(FALLING, 9)
@settings(max_examples=300, deadline=None)
def test_times_of_shares_are_those_of_their_steps(rank, most):
    of = share_times(rank, most)
    at_once = min(rank.most_at_once, most)
    assert of.most == (most if rank.accumulates and at_once else at_once)
    table = step_times(rank.table, at_once)
    expected, longest = [], 0.0
    for samples in range(of.most + 1):
        passes = of.passes(samples)
        each, more = divmod(samples, max(1, passes))
        steps = [each + (i < more) for i in range(passes)]
        assert all(step <= at_once for step in steps)
        longest = max(longest, sum(table[step] for step in steps))
        expected.append(longest)
    assert of.times_ms == pytest.approx(expected, rel=1e-12)
    assert [of.time_ms(n) for n in range(of.most + 1)] == list(of.times_ms)
    assert list(of.times_ms) == sorted(of.times_ms)
    for time_ms in (*of.times_ms, *(t * 1.01 for t in of.times_ms), 0.1):
        assert of.most_by(time_ms) == sum(t <= time_ms for t in of.times_ms) - 1
        assert of.most_before(time_ms) == sum(t < time_ms for t in of.times_ms) - 1
    rates = [n / of.time_ms(n) for n in range(1, of.most + 1)]
    corners = [n / of.time_ms(n) for n in of.corners()]
    assert max(corners, default=0) == pytest.approx(max(rates, default=0), rel=1e-12)


@given(st.lists(ranks(), min_size=1, max_size=3), st.integers(1, 16), st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_the_split_equals_exhaustive_search(members, batch, at_least):
    fleet = Fleet(tuple(members), AllReduce(measured_ms=0.5))
    batch = max(batch, at_least * len(members))
    if batch == 0:
        return
    best = of_all(fleet, batch, at_least)
    if best is None:
        with pytest.raises(PlanningError):
            split_batch(fleet, batch, at_least=at_least)
        return
    plan = split_batch(fleet, batch, at_least=at_least)
    assert plan.batch == batch
    assert min(plan.samples) >= at_least
    assert plan.step_ms == best
    assert step_bound_ms(fleet, batch) <= plan.step_ms * (1 + 1e-12)
    for rank, share in zip(fleet.ranks, plan.shares, strict=True):
        if share.samples:
            assert rank.most_at_once * share.passes >= share.samples
            assert rank.accumulates or share.passes == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PuLP's solvers
@given(st.integers(0, 10_000))
@settings(max_examples=5, deadline=None)
def test_the_split_equals_an_integer_program(seed):
    rng = random.Random(seed)
    members = [
        linear(f"r{i}", rng.uniform(0, 5), rng.uniform(0.2, 3), 40) for i in range(5)
    ]
    fleet = Fleet(tuple(members))
    assert split_batch(fleet, 40).step_ms == pytest.approx(by_ilp(fleet, 40), rel=1e-5)


@given(st.lists(ranks(8), min_size=1, max_size=2), st.integers(1, 6), st.integers(0, 6))
@settings(max_examples=50, deadline=None)
def test_the_best_batch_of_a_range_equals_trying_each(members, least, more):
    fleet = Fleet(tuple(members), AllReduce(measured_ms=1.0))
    rates = []
    for batch in range(least, least + more + 1):
        try:
            rates.append(split_batch(fleet, batch).samples_per_s)
        except PlanningError:
            break
    if not rates:
        with pytest.raises(PlanningError):
            best_batch(fleet, least, least + more)
        return
    found = best_batch(fleet, least, least + more)
    assert least <= found.batch <= least + more
    assert found.samples_per_s == pytest.approx(max(rates))


def test_a_fast_and_a_slow_device_end_together():
    fleet = Fleet((linear("slow", 0, 4.0, 256), linear("fast", 0, 1.0, 256)))
    plan = split_batch(fleet, 250)
    assert plan.samples == (50, 200)
    assert plan.idle_ms == (0.0, 0.0)
    assert equal_shares(fleet, 250).step_ms == 500
    assert proportional_shares(fleet, 250).samples == (50, 200)


@pytest.mark.parametrize("number", [4, 1024])
def test_a_thousand_ranks_look_at_few_shares(number, monkeypatch):
    """Of each kind as many as halving a range of times takes, whatever the batch."""
    looked, most_by = [], ShareTimes.most_by
    monkeypatch.setattr(
        ShareTimes, "most_by", lambda of, ms: (looked.append(of), most_by(of, ms))[1]
    )
    monkeypatch.delattr(ShareTimes, "times_ms")  # of every share there is
    rng = random.Random(0)
    kinds = [(rng.uniform(0.3, 3), rng.uniform(0.1, 2)) for _ in range(number)]
    members = [linear(f"r{i}", *kinds[i % number], 512) for i in range(1024)]
    fleet = Fleet(tuple(members), AllReduce(measured_ms=3.0))
    plan = split_batch(fleet, 65_536)
    assert len(looked) <= 128 * number + len(members)
    assert plan.batch == 65_536
    # No rank could take another sample in the same time: the least time it is.
    longest = max(fixed + each for fixed, each in kinds)
    assert max(plan.idle_ms) <= longest
    below = plan.compute_ms - 1e-9
    fits = (1024 // number) * sum(
        max(n for n in range(513) if n == 0 or fixed + each * n <= below)
        for fixed, each in kinds
    )
    assert fits < 65_536


@pytest.mark.parametrize(
    ("memory", "most"), [(None, 8), (99, 0), (100, 2), (250, 5), (10_000, 8)]
)
def test_the_largest_step_within_memory_is_on_the_line_between_points(memory, most):
    table = a_table("d", (2, 1.0, 100), (6, 2.0, 300), (8, 3.0, 300))
    assert table.most_within(memory) == most


def test_a_table_is_a_line_between_its_points():
    table = a_table("d", (4, 3.0), (2, 2.0))
    assert share_times(Rank("r", table), 4).times_ms == (0.0, 2.0, 2.0, 2.5, 3.0)
    with pytest.raises(ValueError, match="two steps of 3"):
        a_table("d", (3, 1.0), (3, 2.0))
    with pytest.raises(ValueError, match="has no step"):
        StepTable("d", ())


def test_what_cannot_be_shared_out_is_said():
    fleet = Fleet((linear("a", 0, 1.0, 8, accumulates=False),) * 2)
    with pytest.raises(PlanningError, match="at most 16 samples a step, not 17"):
        split_batch(fleet, 17)
    with pytest.raises(ValueError, match="fewer than 2 samples for each of 2 ranks"):
        split_batch(fleet, 3, at_least=2)
    with pytest.raises(PlanningError, match="a takes at most 8 samples a step, not 9"):
        plan_of(fleet, (9, 0))
    with pytest.raises(ValueError, match="1 shares for 2 ranks"):
        plan_of(fleet, (9,))


def test_a_split_is_changed_where_that_pays_and_kept_otherwise():
    fleet = Fleet((linear("a", 0, 1.0, 64), linear("b", 0, 1.0, 64)))
    assert replanned(fleet, (32, 32), (1.0, 1.1)) is None
    changed = replanned(fleet, (32, 32), (1.0, 3.0))
    assert changed is not None
    assert changed.samples == (48, 16)
    # Once changed it stays, with the same factors and with slightly other ones.
    assert replanned(fleet, changed.samples, (1.0, 3.0)) is None
    assert replanned(fleet, changed.samples, (1.0, 2.9)) is None
    # And it goes back when the rank is as it was.
    back = replanned(fleet, changed.samples, (1.0, 1.0))
    assert back is not None
    assert back.samples == (32, 32)


def test_an_all_reduce_is_a_ring():
    ring = AllReduce(nbytes=1000, bytes_per_ms=100.0, latency_ms=0.5)
    assert ring.time_ms(1) == 0
    assert ring.time_ms(2) == 2 * (0.5 + 5)
    assert ring.time_ms(4) == 6 * (0.5 + 2.5)
    assert AllReduce(measured_ms=7.0).time_ms(4) == 7
