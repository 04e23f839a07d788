"""Weights and optimizer state that are at home on the host: nothing else changes."""

from functools import cache

import numpy as np
import pytest

from mucudnn.backends.cpu import device as copies
from mucudnn.errors import BackendError
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.optimizers import Adam
from mucudnn.passes.scheduling.problem import state_bytes
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.checkpoints import Checkpoints
from mucudnn.runtime.training.loop import fit
from mucudnn.runtime.training.trainer import Trainer
from tests.training_cases import tuner_of

BATCH, SIDE, WIDTH, CLASSES = 4, 8, 256, 3

pytestmark = pytest.mark.usefixtures("short_searches")


def network(*, training=True):
    """Wide dense layers: nearly all of it is parameters and their state."""
    g = GraphBuilder(training=training)
    x = g.relu(g.batch_norm(g.conv(g.input("image", (BATCH, 2, SIDE, SIDE)), 4, 3)))
    x = g.flatten(x)
    for _ in range(4):
        x = g.dropout(g.relu(g.linear(x, WIDTH)), 0.1)
    logits, label = g.linear(x, CLASSES), g.input("label", (BATCH,), "int64")
    return g.build(g.softmax_cross_entropy(logits, label), g.accuracy(logits, label))


def trainer(budget=None, **options):
    return Trainer(
        network(),
        network(training=False),
        tuner=tuner_of(),
        optimizer=Adam(learning_rate=0.01),
        budget=budget,
        seed=3,
        **options,
    )


class Images:
    """Three batches, the same in every epoch."""

    def __len__(self):
        return 3

    def epoch(self, epoch, start=0):
        for i in range(start, 3):
            rng = np.random.default_rng(i)
            images = rng.standard_normal((BATCH, 2, SIDE, SIDE), dtype="f4")
            yield images, rng.integers(0, CLASSES, BATCH)


@cache
def without_budget():
    """Return the history of training in all memory, and the bytes of its state."""
    made = trainer()
    return history(made), state_bytes(made.graph)


def within(share, **options):
    """A budget that is a share of what parameters and state take alone."""
    nbytes = int(share * without_budget()[1])
    return MemoryBudget(nbytes=nbytes, convolutions="fixed", **options)


def history(made):
    """Steps with evaluations in between."""
    found = []
    for epoch in range(2):
        for images, labels in Images().epoch(epoch):
            found.append(made.step(images, labels))
        found.append(made.evaluate(Images()))
    state = {name: array.tobytes() for name, array in made.state.save().items()}
    made.close()
    return found, state


@pytest.mark.parametrize("scheduler", [None, "timed", "on_demand", "adaptive_window"])
@pytest.mark.parametrize("where", ["host", "disk"])
def test_training_and_evaluation_give_the_same_bits(scheduler, where, tmp_path):
    disk = tmp_path if where == "disk" else None
    policy = "planned" if scheduler is None else "paging"
    budget = within(0.6, policy=policy, scheduler=scheduler, disk=disk)
    made = trainer(budget)
    schedule = made.placed.plan.schedule
    assert schedule.hosted
    assert made.peak_bytes <= budget.nbytes < state_bytes(made.graph)
    if scheduler == "timed":
        assert schedule.live_across
    assert history(made) == without_budget()[0]


def test_accumulated_gradients_are_at_home_there_too():
    def accumulated(budget=None):
        made = Trainer(
            network(),
            tuner=tuner_of(),
            optimizer=Adam(learning_rate=0.01),
            budget=budget,
            gradient_accumulation=2,
        )
        rng = np.random.default_rng(0)
        images = rng.standard_normal((2 * BATCH, 2, SIDE, SIDE), dtype="f4")
        found = [made.step(images, np.arange(2 * BATCH) % CLASSES) for _ in range(3)]
        nbytes = state_bytes(made.graph)
        state = {name: array.tobytes() for name, array in made.state.save().items()}
        made.close()
        return found, state, nbytes

    *expected, nbytes = accumulated()
    budget = MemoryBudget(nbytes=int(0.6 * nbytes), convolutions="fixed")
    *found, _ = accumulated(budget)
    assert found == expected


def test_a_checkpoint_goes_from_one_budget_to_another(tmp_path):
    """What is carried on the device when it is written is in it as well."""
    budget = within(0.6, policy="paging", scheduler="timed")
    first = trainer(budget)
    fit(first, Images(), epochs=1, checkpoints=Checkpoints(tmp_path))
    first.close()
    second = trainer()
    checkpoints = Checkpoints(tmp_path)
    fit(second, Images(), epochs=2, checkpoints=checkpoints, resume=checkpoints.load())
    straight = trainer()
    fit(straight, Images(), epochs=2)
    for name, array in straight.state.save().items():
        np.testing.assert_array_equal(second.state.save()[name], array, err_msg=name)
    third = trainer(budget)
    third.state.load(straight.state.save())
    for name, array in straight.state.save().items():
        np.testing.assert_array_equal(third.state.save()[name], array, err_msg=name)


def test_what_is_carried_is_brought_home_before_the_state_is_read():
    made = trainer(within(0.6, policy="paging", scheduler="timed"))
    live_across = made.placed.plan.schedule.live_across
    before = {name: made.state.save()[name] for name in live_across}
    for images, labels in Images().epoch(0):
        made.step(images, labels)
    after = made.state.save()
    changed = [name for name in live_across if (before[name] != after[name]).any()]
    assert changed
    made.close()
    assert made.state.save().keys() == after.keys()


def test_a_step_that_fails_can_go_on_from_the_last_checkpoint(tmp_path, monkeypatch):
    made = trainer(within(0.6, policy="paging", scheduler="timed"))
    checkpoints = Checkpoints(tmp_path)
    fit(made, Images(), epochs=1, checkpoints=checkpoints)
    saved = made.state.save()
    images, labels = next(Images().epoch(0))
    carry, left = copies._copy_chunks, [20]

    def failing(*arguments):
        left[0] -= 1
        if left[0] == 0:
            raise OSError("the host is gone")
        return carry(*arguments)

    def steps():
        for _ in range(3):
            made.step(images, labels)

    with monkeypatch.context() as patch:
        patch.setattr(copies, "_copy_chunks", failing)
        with pytest.raises(BackendError, match="the host is gone"):
            steps()
    made.state.load(checkpoints.load().arrays)
    for name, array in saved.items():
        np.testing.assert_array_equal(made.state.save()[name], array, err_msg=name)
    assert np.isfinite(made.step(images, labels).loss)
    made.close()
