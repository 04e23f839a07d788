"""What each process of `mpiexec mucudnn train` takes, without any MPI."""

import pytest

from mucudnn.cli.app import BadInputError
from mucudnn.cli.training.ranks import Group
from mucudnn.errors import OutOfMemoryError, PlanningError
from mucudnn.ir.fleet import StepPoint, StepTable
from mucudnn.passes.fleet.sizes import measured_table


class Pair:
    """The first of two processes; `other` is the table that the second one says."""

    rank, size = 0, 2

    def __init__(self, other):
        self.other = other

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
    other = StepTable("cpu", (StepPoint(1, 1.0), StepPoint(11, 11.0)))
    free = Group(Pair(other)).shares("auto", 12, steps(0.5, 11))
    assert free == (8, 4)
    tight = Group(Pair(other)).shares("auto", 12, steps(0.5, 5, OutOfMemoryError))
    assert tight == (5, 7)


def test_what_fits_no_processes_together_is_refused():
    other = StepTable("cpu", (StepPoint(1, 1.0), StepPoint(4, 4.0)))
    with pytest.raises(BadInputError, match="take 7 images a step, not 12; --split"):
        Group(Pair(other)).shares("auto", 12, steps(1.0, 3))
    with pytest.raises(PlanningError, match="1 do not fit"):
        Group(Pair(other)).shares("auto", 12, steps(1.0, 0))


def test_equal_shares_measure_nothing_and_differ_by_one():
    group = Group(Pair(None))
    assert group.shares("equal", 13, steps(1.0, 0)) == (7, 6)
    with pytest.raises(BadInputError, match="2 processes cannot share 1 images"):
        group.shares("equal", 1, steps(1.0, 0))


def test_a_process_has_its_own_of_several_budgets():
    group = Group(Pair(None))
    assert group.own({"budget": (1, 2)}) == {"budget": 1}
    assert group.own({"budget": 5}) == {"budget": 5}
    with pytest.raises(BadInputError, match="3 sizes for 2 processes"):
        group.own({"budget": (1, 2, 3)})


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
    assert table.times(table.most) == pytest.approx(range(table.most + 1))
