"""Ranks that each have some rows of a batch compute what one process computes."""

import numpy as np
import pytest

from tests.together import Threads, trained

CLOSE = 1e-8
"""In double precision: the order of sums, no more."""


@pytest.fixture(scope="module")
def alone():
    known = {}

    def one(name):
        if name not in known:
            known[name] = trained(name)
        return known[name]

    return one


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("shares", [(9, 3), (1, 6, 5)])
@pytest.mark.parametrize("name", ["residual", "unet"])
def test_synchronised_statistics_make_the_function_of_one_process(
    name, shares, fuse, alone
):
    steps, state = alone(name)
    found = Threads(len(shares)).run(
        lambda rank: trained(name, shares, rank, batch_norm="synchronised", fuse=fuse)
    )
    for mine, theirs in found:
        assert [loss for loss, _ in mine] == pytest.approx(
            [loss for loss, _ in steps], rel=CLOSE
        )
        assert [right for _, right in mine] == [right for _, right in steps]
        assert theirs.keys() == state.keys()
        for key, value in theirs.items():
            np.testing.assert_allclose(value, state[key], rtol=1e-6, atol=CLOSE)
            np.testing.assert_array_equal(value, found[0][1][key])


def test_statistics_of_each_rank_are_another_function(alone):
    steps, _ = alone("unet")
    found = Threads(2).run(lambda rank: trained("unet", (9, 3), rank))
    first = [mine[0][0] for mine, _ in found]
    assert first[0] == first[1] != pytest.approx(steps[0][0], rel=1e-6)


def test_orders_may_be_the_rank_s_own(alone):
    orders = "depth_first", "least_peak"
    shares = 9, 3
    found = Threads(2).run(
        lambda rank: trained("plain", shares, rank, order=orders[rank.rank])
    )
    steps, _ = alone("plain")
    for mine, theirs in found:
        assert [each[0] for each in mine] == pytest.approx(
            [loss for loss, _ in steps], rel=CLOSE
        )
        for key, value in theirs.items():
            np.testing.assert_array_equal(value, found[0][1][key])


def test_statistics_that_would_not_meet_are_refused():
    orders = "builder", "depth_first"
    with pytest.raises(ValueError, match="the same order and split on all of them"):
        Threads(2).run(
            lambda rank: trained(
                "branches",
                (9, 3),
                rank,
                order=orders[rank.rank],
                batch_norm="synchronised",
            )
        )


def test_words_about_statistics_are_checked():
    with pytest.raises(ValueError, match="unknown batch_norm 'global'; choose one of"):
        trained("unet", batch_norm="global")
