"""Training where results come after the next step was launched: as if they did not."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from mucudnn.errors import TrainingError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.tensor import Role
from mucudnn.passes.graph.inplace import in_place
from mucudnn.runtime.executor import Present
from mucudnn.runtime.executor.tasks import Copies
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.checkpoints import Checkpoints
from mucudnn.runtime.training.loop import fit
from mucudnn.runtime.training.sizes import size_profile
from mucudnn.runtime.training.stepping import StepResult, known_result
from tests.one_algorithm import one_algorithm
from tests.test_executor import LazyCopier
from tests.training_cases import Epochs, examples, trainer, tuner_of

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


def test_what_computes_next_waits_for_copies_where_the_host_does_not(monkeypatch):
    monkeypatch.setattr(LazyCopier, "finish", None)
    copier = LazyCopier()
    copies = Copies([lambda: copier])
    away, here = (np.arange(1.0, 4.0) for _ in range(2))
    left, came = np.zeros(3), np.zeros(3)
    with copies.of_a_step(waits=False):
        copies.bound("out", 0, here[:2], left[:2], ())()
        copies.bound("back", 1, away[:2], came[:2], ())()
        copies.bound("out", 2, here[2:], left[2:], ())()
        copies.bound("back", 3, away[2:], came[2:], (0,))()
        assert copier.done == 0
    assert np.array_equal(left, here)
    assert np.array_equal(came, away)
    with copies.of_a_step(waits=False):
        pass  # nothing is waited for twice
    assert copier.done == 4


class Direct:
    """Takes inputs and results at once."""

    def __init__(self, device):
        self.upload, self._device = device.upload, device

    def download(self, source):
        return Present(self._device.download(source))

    def close(self):
        pass


def test_the_host_waits_for_copies_when_state_is_asked_for(monkeypatch):
    cpu, finished, finish = one_algorithm(), [], Copies.finish
    backend = replace(cpu, step_io=lambda staged: Direct(cpu.device))
    nbytes = trainer(BATCH, evaluate=False).peak_bytes
    within = MemoryBudget(nbytes=nbytes, policy="vdnn_all", convolutions="fixed")
    made = trainer(BATCH, backend=backend, evaluate=False, budget=within)
    assert not made.placed.schedule.live_across
    monkeypatch.setattr(
        Copies, "finish", lambda copies: (finished.append(1), finish(copies))
    )
    for _ in range(2):
        made.step(*examples(BATCH))
    assert not finished
    made.state.save()
    assert finished


def test_inputs_get_room_of_a_budget_where_that_is_predicted_to_be_faster():
    """Than to fetch them as a step begins. All times are made up."""
    cpu, told = one_algorithm(), []

    def step_io(staged):
        told.append(staged)
        return Direct(cpu.device)

    free, rate = trainer(BATCH, evaluate=False), 300.0
    arriving = sum(s.nbytes for s in free.graph.with_role(Role.INPUT))
    costs = size_profile(tuner_of(), in_place(free.graph))
    costs = replace(costs, in_bytes_per_ms=rate, out_bytes_per_ms=rate)
    plans = {
        problem: ConvPlan(problem, tuple(replace(s, time_ms=1.0) for s in plan.steps))
        for problem, plan in free.plans.items()
    }
    for share in (0.8, 0.9):
        nbytes = int(free.peak_bytes * share)
        within = MemoryBudget(nbytes=nbytes, convolutions="fixed", measured=costs)
        more = {"evaluate": False, "budget": within, "plans": plans}
        fetched = trainer(BATCH, **more)
        made = trainer(BATCH, backend=replace(cpu, step_io=step_io), **more)
        assert made.peak_bytes <= nbytes
        one, other = (m.placed.plan.prediction for m in (made, fetched))
        if told[-1]:
            assert made.peak_bytes == made.placed.nbytes + arriving
            busy = (one.in_bytes + arriving) / rate  # of the link
            assert max(one.step_ms, busy) <= other.step_ms + arriving / rate
        else:
            assert made.placed.schedule == fetched.placed.schedule
        assert fetched.placed.nbytes + arriving > nbytes
    assert told == [True, False]
    assert made.step(*examples(BATCH)) == free.step(*examples(BATCH))
