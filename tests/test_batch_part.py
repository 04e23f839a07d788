"""Ranks with rows of a batch, budgets and slices compute what one process computes."""

import re

import numpy as np
import pytest

from mucudnn.data import Loader, SyntheticDataset
from mucudnn.errors import MucudnnError
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.optimizers import DynamicLossScale, Momentum
from mucudnn.passes.graph.precision import COUNTS
from mucudnn.runtime.training import ranks
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.loop import fit
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner
from tests.shaky import shaky
from tests.together import Threads, network, trained, trainer_of, tuner_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*PuLP 4.0:DeprecationWarning"  # silenced in one thread only
)

CLOSE = 1e-8
"""In double precision: the order of sums, no more."""


@pytest.fixture(scope="module")
def alone():
    known = {}

    def one(name, **options):
        key = name, *options.items()
        if key not in known:
            known[key] = trained(name, **options)
        return known[key]

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
    agree(found, steps, state)


def test_statistics_of_each_rank_are_another_function(alone):
    steps, _ = alone("unet")
    found, _ = together("unet", [{}, {}])
    first = [mine[0][0] for mine, _ in found]
    assert first[0] == first[1] != pytest.approx(steps[0][0], rel=1e-6)


def test_orders_may_be_the_rank_s_own(alone):
    found, _ = together("plain", [{"order": "depth_first"}, {"order": "least_peak"}])
    agree(found, *alone("plain"))


def test_statistics_that_would_not_meet_are_refused():
    orders = {"order": "builder"}, {"order": "depth_first"}
    with pytest.raises(ValueError, match="use the same order and split on all"):
        together("branches", orders, batch_norm="synchronised")
    with pytest.raises(ValueError, match="unknown batch_norm 'global'; choose one of"):
        trained("unet", batch_norm="global")


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


SHARES = 9, 3


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
