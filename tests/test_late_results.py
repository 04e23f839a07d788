"""Training where results come after the next step was launched: as if they did not."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from mucudnn.errors import TrainingError
from mucudnn.runtime.training.checkpoint import Checkpoints
from mucudnn.runtime.training.loop import fit
from mucudnn.runtime.training.step_result import StepResult, known_result
from tests.training_cases import Epochs, examples, trainer

BATCH = 8
TESTED = {"test": Epochs(2 * BATCH, BATCH), "eval_every": 3}


def trained(folder, **more):
    """Reports, positions in the order they were told, and steps of checkpoints."""
    made, told, kept = trainer(BATCH), [], Checkpoints(folder, keep=99)
    launched, tested = [], []
    step, evaluate = made.step, made.evaluate

    def evaluated(batches):
        tested.append(len(launched))
        return evaluate(batches)

    made.evaluate = evaluated

    def counted(*batch):
        launched.append(made.steps)
        return step(*batch)

    made.step = counted

    def progress(at, report):
        if report is None:
            told.append((replace(at, ms=0.0), len(launched)))

    reports = fit(
        made,
        Epochs(5 * BATCH, BATCH),
        epochs=2,
        checkpoints=kept,
        progress=progress,
        **more,
    )
    found = [replace(report, images_per_s=0.0) for report in reports]
    return (
        found,
        told,
        (tested, sorted(p.name for p in folder.iterdir())),
        made.state.save(),
    )


@pytest.mark.parametrize(
    "more", [{}, {"max_steps": 7}, {"checkpoint_every": 2}, TESTED]
)
def test_reports_positions_and_checkpoints_are_the_same(more, tmp_path, monkeypatch):
    folders = tmp_path / "at once", tmp_path / "late"
    expected = trained(folders[0], **more)
    monkeypatch.setattr(StepResult, "ready", False)
    found = trained(folders[1], **more)
    assert found[0] == expected[0]
    assert [at for at, _ in found[1]] == [at for at, _ in expected[1]]
    assert found[2] == expected[2]
    for name, value in expected[3].items():
        assert np.array_equal(found[3][name], value), name
    assert all(at.steps == launched for at, launched in expected[1])
    # All but the last of an epoch, and what a checkpoint is made of, come late.
    assert any(at.steps == launched - 1 for at, launched in found[1])


def test_a_loss_that_is_no_number_is_told_of_its_own_step(monkeypatch):
    monkeypatch.setattr(StepResult, "ready", False)
    made, batches = trainer(BATCH, evaluate=False), Epochs(4 * BATCH, BATCH)
    step = made.step

    def spoiled(images, labels):
        if made.steps == 1:
            images = images * np.nan
        return step(images, labels)

    made.step = spoiled
    with pytest.raises(TrainingError, match=r"step 2 of epoch 1 \(step 2 of all"):
        fit(made, batches, epochs=1)


def test_a_result_is_a_value():
    images, labels = examples(BATCH)
    first, second = (trainer(BATCH).step(images, labels) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != known_result(0.0, 0, BATCH, BATCH, 0.05)
    assert first != "a result"
    assert pickle.loads(pickle.dumps(first)) == first
    assert repr(
        first
    ) == f"StepResult(loss={first.loss!r}, correct={first.correct}, " + (
        f"labels={BATCH}, images={BATCH}, learning_rate={first.learning_rate!r})"
    )
    assert first.ready
