"""What each process of `mpiexec mucudnn train` takes, without any MPI."""

import pytest
from hypothesis import given, settings, strategies as st

from mucudnn.cli.app import BadInputError
from mucudnn.cli.train_ranks import Group, own_settings
from mucudnn.errors import OutOfMemoryError, PlanningError
from mucudnn.ir.fleet import Fleet, Rank, StepPoint, StepTable
from mucudnn.passes.load_balancing import (
    AskedTable,
    RankReport,
    measured_table,
    plan_of,
    split_batch,
)
from tests.tables import step_times


class Pair:
    """The first of two processes; `other` is the table that the second one says."""

    rank, size = 0, 2

    def __init__(self, other):
        self.other = other and RankReport(other, frozenset(range(1, other.most + 1)))

    def all_gather(self, value):
        return [value, self.other]


def steps(each, most, error=PlanningError):
    """Samples -> what a step takes; above the most it does not fit."""

    def measure(samples):
        if samples > most:
            raise error(f"{samples} do not fit")
        return StepPoint(samples, each * samples)

    return measure


def test_a_rank_takes_no_more_than_fits_its_budget():
    def shared(most, each, fit, **more):
        other = StepTable("cpu", (StepPoint(1, 1.0), StepPoint(most, float(most))))
        return Group(Pair(other)).shares("auto", 12, steps(each, fit, **more))

    assert shared(11, 0.5, 11) == (8, 4)
    assert shared(11, 0.5, 5, error=OutOfMemoryError) == (5, 7)
    with pytest.raises(BadInputError, match="7 images a step, not 12; try --split"):
        shared(4, 1.0, 3)
    with pytest.raises(PlanningError, match="1 do not fit"):
        shared(4, 1.0, 0)


def test_equal_shares_measure_nothing_and_differ_by_one():
    group = Group(Pair(None))
    assert group.shares("equal", 13, steps(1.0, 0)) == (7, 6)
    with pytest.raises(BadInputError, match="2 processes cannot share 1 images"):
        group.shares("equal", 1, steps(1.0, 0))


def test_a_process_has_its_own_of_several_budgets():
    group = Group(Pair(None))
    assert own_settings({"budget": (1, 2)}, group) == {"budget": 1}
    assert own_settings({"budget": 5}, group) == {"budget": 5}
    with pytest.raises(BadInputError, match="3 sizes for 2 processes"):
        own_settings({"budget": (1, 2, 3)}, group)


@pytest.mark.parametrize("most", [1, 2, 7, 40, 100])
def test_a_table_ends_where_steps_no_longer_fit(most):
    asked = []

    def measure(samples):
        asked.append(samples)
        return steps(1.0, most)(samples)

    table = measured_table("d", 1, 64, measure, unfitting=PlanningError)
    assert table.most <= min(most, 64)
    assert table.most >= min(most, 64) * 15 // 16
    assert len(asked) == len(set(asked)) <= 9
    assert step_times(table, table.most) == pytest.approx(range(table.most + 1))


class Ranks:
    """All processes in one: each with a table that is asked, in turns."""

    def __init__(self, times, mosts, batch):
        self.asked = [[] for _ in times]
        self.tables = [
            AskedTable(
                "d", 1, batch, self.measuring(i, time, most), unfitting=(PlanningError,)
            )
            for i, (time, most) in enumerate(zip(times, mosts, strict=True))
        ]
        self.batch = batch

    def measuring(self, rank, time, most):
        def measure(samples):
            self.asked[rank].append(samples)
            if samples > most:
                raise PlanningError(f"{samples} do not fit")
            return StepPoint(samples, time(samples))

        return measure

    def shares(self):
        for table in self.tables:
            table.ask(self.batch // len(self.tables))
        while True:
            told = [table.report() for table in self.tables]
            fleet = Fleet(tuple(Rank("", t.table, accumulates=False) for t in told))
            found = split_batch(fleet, self.batch, at_least=1).samples
            known = [t.knows(n) for t, n in zip(told, found, strict=True)]
            if all(known):
                return found
            for table, share, knows in zip(self.tables, found, known, strict=True):
                if not knows:
                    table.ask(share)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.lists(
        st.tuples(st.floats(0.0, 20.0), st.floats(0.1, 5.0), st.floats(0.7, 1.0)),
        min_size=2,
        max_size=4,
    ),
    batch=st.integers(8, 300),
    tight=st.booleans(),
)
def test_few_sizes_are_asked_for_and_shares_are_hardly_worse(ranks, batch, tight):
    """Of concave times; beside those of tables that know every size."""
    times = [lambda n, r=r: r[0] + r[1] * n ** r[2] for r in ranks]
    mosts = [
        batch // len(ranks) + 2 * i + 1 if tight else batch for i in range(len(ranks))
    ]
    asked = Ranks(times, mosts, batch)
    shares = asked.shares()
    assert sum(shares) == batch
    assert all(1 <= n <= most for n, most in zip(shares, mosts, strict=True))
    whole = [
        StepTable("d", tuple(StepPoint(n, time(n)) for n in range(1, most + 1)))
        for time, most in zip(times, mosts, strict=True)
    ]
    fleet = Fleet(tuple(Rank("", table, accumulates=False) for table in whole))
    best = split_batch(fleet, batch, at_least=1)
    assert plan_of(fleet, shares).compute_ms <= 1.2 * best.compute_ms + 1e-9
    fitting = [
        sum(n <= most for n in sizes)
        for sizes, most in zip(asked.asked, mosts, strict=True)
    ]
    assert max(fitting) <= 12
