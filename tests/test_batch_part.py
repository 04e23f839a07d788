"""Ranks that each have some rows of a batch compute what one process computes."""

import numpy as np
import pytest

from mucudnn.data import Loader, SyntheticDataset
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.optimizers import Momentum
from mucudnn.runtime.training import ranks
from mucudnn.runtime.training.loop import fit
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner
from tests.shaky import shaky
from tests.together import Threads, network, trained, trainer_of, tuner_of

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
    with pytest.raises(ValueError, match="use the same order and split on all"):
        Threads(2).run(
            lambda rank: trained(
                "branches",
                (9, 3),
                rank,
                order=orders[rank.rank],
                batch_norm="synchronised",
            )
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([{"learning_rate": 0.1}, {"learning_rate": 0.2}], "learning_rate is 0.1 on"),
        ([{"seed": 0}, {"seed": 1}], "seed is 0 on rank 0, 1 on rank 1"),
        ([{}, {"optimizer": "adam"}], r"optimizer is Momentum\(.* Adam\("),
        ([{}, {"optimizer": Momentum(momentum=0.5)}], "optimizer is Momentum"),
        ([{}, {"precision": "float16"}], "precision is None on rank 0, float16 on"),
        ([{}, {"loss_scale": "dynamic"}], "loss_scale is 1.0 on rank 0, Dynamic"),
        ([{}, {"gradient_accumulation": 2}], "gradient_accumulation is 1 on rank 0"),
        ([{}, {"batch_norm": "synchronised"}], "batch_norm is per_rank on rank 0"),
        ([{}, {"fuse": False}], "fuse is True on rank 0, False on rank 1"),
        ([{}, {"name": "wider"}], r"node conv/conv is .*\(6, N.*\(8, N"),
        ([{}, {"name": "calmer"}], r"node dropout is .*0\.25.* on rank 0, .*0\.5"),
        ([{}, {"state": True}], "weights is of digest"),
        ([{}, {"steps": 3}], "step is 0 on rank 0, 3 on rank 1"),
    ],
)
def test_ranks_that_differ_in_anything_are_refused_before_a_step(options, said):
    def ranked(rank):
        own = {"optimizer": "momentum", **options[rank.rank]}
        graph = network(own.pop("name", "plain"), (9, 3)[rank.rank])
        steps, state = own.pop("steps", 0), own.pop("state", False)
        with (
            tuner_of() as tuner,
            Trainer(graph, tuner=tuner, together=rank, **own) as trainer,
        ):
            trainer.steps = steps
            if state:
                values = trainer.state.save()
                trainer.state.load({k: v + 1 for k, v in values.items()})
            batch = graph.tensors["image"].shape
            trainer.step(np.zeros(batch), np.zeros(batch[0], "int64"))

    with pytest.raises(ValueError, match=f"need the same settings, but .*{said}"):
        Threads(2).run(ranked)


@pytest.mark.parametrize("name", ["resnet18", "unet", "residual", "branches"])
def test_networks_of_unequal_shares_are_one_network(name):
    graphs = network(name, 9), network(name, 3), network(name, 12)
    first, *rest = (ranks._network(graph, (9, 3)) for graph in graphs)
    assert all(other == first for other in rest)


@pytest.mark.parametrize(
    "what", ["epochs", "max_steps", "eval_every", "words", "batches"]
)
def test_loops_that_differ_are_refused_before_a_step(what):
    def ranked(rank):
        graph, odd = network("plain", 6), rank.rank == 1
        length = 36 if odd and what == "batches" else 48
        loader = Loader(SyntheticDataset(length, 5, (3, 8, 8)), 6)
        own = {"epochs": 1, "max_steps": 2, "eval_every": 2, "words": {"lr": 1}}
        if odd and what != "batches":
            own[what] = {"lr": 2} if what == "words" else 7
        with tuner_of() as tuner, trainer_of(graph, tuner, together=rank) as trainer:
            fit(trainer, loader, loader, **own)

    named = {"words": "lr is 1", "batches": "batches is 8"}.get(what, f"{what} is ")
    with pytest.raises(ValueError, match=named):
        Threads(2).run(ranked)


def test_ranks_plan_by_what_their_cache_keeps(tmp_path):
    """Each measures times of its own; a later training has the same plans."""
    problems = [
        ConvProblem(direction=way, x_shape=(8, 3, 9, 9), w_shape=(k, 3, 3, 3))
        for way in Direction
        for k in (4, 6, 8)
    ]

    def plans(seeds):
        def ranked(rank):
            backend = shaky(0, jitter=0.6)
            backend.conv._runs.seed(seeds[rank.rank])
            tuner = Tuner(
                backend=backend,
                workspace_limit=4096,
                cache=tmp_path / "cache.sqlite",
                rule=StoppingRule(min_samples=1, max_samples=1),
            )
            with tuner:
                own = ranks.Ranks(rank, network("plain", 4))
                return own.plan_until_cached(tuner, lambda: tuner.plan(problems))

        return Threads(2).run(ranked)

    cold = plans((1, 2))
    assert cold == plans((3, 4)) == plans((5, 6))


def test_words_about_statistics_are_checked():
    with pytest.raises(ValueError, match="unknown batch_norm 'global'; choose one of"):
        trained("unet", batch_norm="global")
