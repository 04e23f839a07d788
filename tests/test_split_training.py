"""Trainers whose step runs in slices: the same training, in less memory."""

import numpy as np
import pytest

from mucudnn.errors import PlanningError
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.trainer import Trainer
from tests.training_cases import examples, network, tuner_of

BATCH = 12


def losses(trainer, steps=3):
    found = []
    for step in range(steps):
        images, labels = examples(BATCH, seed=step)
        found.append(trainer.step(images, labels))
    return found


def trained(split, *, norm=True, **options):
    with (
        tuner_of() as mine,
        Trainer(
            network(BATCH, dropout=0.25, norm=norm),
            network(5, training=False, norm=norm),
            tuner=mine,
            optimizer="momentum",
            learning_rate=0.05,
            split=split,
            **options,
        ) as trainer,
    ):
        found = losses(trainer)
        answers = trainer.predict(examples(7)[0])
        weights = {n: np.array(v) for n, v in trainer.state.save().items()}
        return found, answers, weights, trainer.splitting


@pytest.fixture(scope="module", params=[True, False])
def whole(request):
    """Whether a network normalises, and its training in one piece."""
    return request.param, trained("none", norm=request.param)


@pytest.mark.parametrize("split", [3, 5, "height:3"])
def test_training_in_slices_is_the_same_training(split, whole):
    norm, expected = whole
    found = trained(split, norm=norm)
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine.correct == theirs.correct
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-3, atol=1e-4)


def test_a_budget_does_not_change_the_bits_of_a_step_in_parts():
    kept = trained(3)
    budget = MemoryBudget(nbytes="200KiB", convolutions="fixed")
    found = trained(3, budget=budget)
    for name, array in kept[2].items():
        np.testing.assert_array_equal(found[2][name], array, err_msg=name)
    assert [r.loss for r in found[0]] == [r.loss for r in kept[0]]


def test_whole_or_in_parts_is_decided_by_what_was_measured():
    found, _, _, splitting = trained("auto", budget="1MiB")
    assert np.isfinite([r.loss for r in found]).all()
    assert splitting.tried[0].parts == 1
    assert splitting.chosen.step_ms <= min(c.step_ms for c in splitting.tried)
    assert splitting.lines[0] == splitting.reason


def test_what_was_measured_of_the_step_is_not_taken_for_evaluation():
    found = trained("auto", norm=False, budget="64MiB")
    whole = trained("none", norm=False)
    assert found[3].chosen.parts == 1
    np.testing.assert_allclose(found[1], whole[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("split", ["some", 0, -2])
def test_other_splits_are_refused(split):
    with pytest.raises(ValueError, match="split"):
        trained(split)


@pytest.mark.parametrize("split", ["auto", "height"])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"budget": 1024}, "the minimum is"),
        ({"budget": "1MiB", "precision": "bfloat16"}, "CPU has float32 and float64"),
    ],
)
def test_why_no_way_can_be_measured_is_said(split, options, reason):
    with pytest.raises(PlanningError, match=f"whole or in parts.*{reason}"):
        trained(split, **options)
