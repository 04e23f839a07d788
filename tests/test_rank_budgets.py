"""Ranks that plan, cut and scale their steps apart compute one process's function."""

import re

import numpy as np
import pytest

from mucudnn.errors import MucudnnError
from mucudnn.ir.optimizers import DynamicLossScale
from mucudnn.passes.graph.precision import COUNTS
from mucudnn.runtime.training.budget import MemoryBudget
from tests.together import Threads, network, trained, trainer_of, tuner_of

CLOSE = 1e-8
"""In double precision: the order of sums, no more."""

SHARES = 9, 3

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*PuLP 4.0:DeprecationWarning"  # silenced in one thread only
)


@pytest.fixture(scope="module")
def alone():
    known = {}

    def one(name, **options):
        key = name, *options.items()
        if key not in known:
            known[key] = trained(name, **options)
        return known[key]

    return one


def together(name, each, **options):
    """What ranks with options of their own found, and what was seen of each trainer."""
    looks = [None, None]

    def ranked(rank):
        def look(trainer):
            looks[rank.rank] = (
                trainer.peak_bytes,
                trainer.placed and trainer.placed.plan,
                trainer.segments,
            )

        own = each[rank.rank]
        return trained(name, SHARES, rank, look=look, **own, **options)

    return Threads(2).run(ranked), looks


def least_bytes(name, samples):
    """What is enough for a step of so many samples, whatever is measured."""
    with tuner_of() as tuner, pytest.raises(MucudnnError) as refused:
        trainer_of(network(name, samples), tuner, budget="1KiB")
    return int(re.findall(r"(\d+) bytes\) is enough", str(refused.value))[0])


def agree(found, steps, state, close=CLOSE):
    for mine, theirs in found:
        assert [loss for loss, _ in mine] == pytest.approx(
            [loss for loss, _ in steps], rel=close
        )
        assert [right for _, right in mine] == [right for _, right in steps]
        assert theirs.keys() == state.keys()
        for key, value in theirs.items():
            np.testing.assert_allclose(value, state[key], rtol=1e-6, atol=close)
            np.testing.assert_array_equal(value, found[0][1][key])


@pytest.mark.parametrize(
    ("name", "policy", "times"),
    [
        ("plain", "planned", 1.25),
        ("residual", "superneurons", 3),
        ("unet", "superneurons", 3),
        pytest.param("residual", "planned", 1.25, marks=pytest.mark.slow),
        pytest.param("unet", "planned", 1.25, marks=pytest.mark.slow),
    ],
)
def test_each_rank_keeps_its_own_budget(name, policy, times, alone, short_search):
    budgets = [int(times * least_bytes(name, n)) for n in SHARES]
    found, looks = together(
        name,
        [{"budget": MemoryBudget(nbytes=n, policy=policy)} for n in budgets],
        batch_norm="synchronised",
    )
    agree(found, *alone(name))
    for (peak, plan, _), budget in zip(looks, budgets, strict=True):
        assert 0 < peak <= budget
        assert plan.prediction.out_bytes or plan.recomputed


@pytest.mark.parametrize("statistics", ["per_rank", "synchronised"])
@pytest.mark.parametrize("name", ["residual", "unet", "plain"])
def test_each_rank_cuts_its_step_in_slices_of_its_own(name, statistics, alone):
    cut = [{"split": 4}, {"split": 2}]
    found, looks = together(name, cut, batch_norm=statistics)
    assert all(segments for *_, segments in looks)
    if statistics == "synchronised":
        agree(found, *alone(name))
        return
    whole, _ = together(name, [{}, {}], batch_norm=statistics)
    for mine, (steps, state) in zip(found, whole, strict=True):
        agree([mine], steps, state)


@pytest.mark.parametrize(
    "name", [pytest.param("residual", marks=pytest.mark.slow), "plain"]
)
def test_a_rank_fits_its_budget_in_slices_alone(name, alone):
    budget = least_bytes(name, SHARES[0]) * 9 // 10
    with tuner_of() as tuner, pytest.raises(MucudnnError):
        trainer_of(network(name, SHARES[0]), tuner, budget=budget)
    cut = [{"split": 2, "budget": budget}, {}]
    found, looks = together(name, cut, batch_norm="synchronised")
    agree(found, *alone(name))
    assert looks[0][0] <= budget


@pytest.mark.parametrize("name", ["residual", "plain"])
def test_batches_accumulated_by_all_ranks_are_those_of_one_process(name):
    shares = 4, 2
    options = {"parts": 2, "batch_norm": "synchronised"}
    steps, state = trained(name, (sum(shares),), parts=2)
    found = Threads(2).run(lambda rank: trained(name, shares, rank, **options))
    agree(found, steps, state)


def test_all_ranks_find_an_overflow_of_one():
    scaling = DynamicLossScale(initial=2.0**126, interval=2)
    options = {"dtype": "float32", "loss_scale": scaling}
    steps, state = trained("plain", **options)
    found, _ = together("plain", [{"budget": "1MiB"}, {"split": 2}], **options)
    for mine, theirs in found:
        assert [loss for loss, _ in mine] == pytest.approx(
            [loss for loss, _ in steps], rel=1e-5
        )
        np.testing.assert_array_equal(theirs[COUNTS], state[COUNTS])
        for key, value in theirs.items():
            np.testing.assert_array_equal(value, found[0][1][key])
