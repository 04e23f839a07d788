"""The loop over epochs: steps, evaluation, checkpoints.

Everything random follows from seeds and positions, so training goes on bit-exactly
from (epoch, batch): what a checkpoint holds, beside the weights, is where it was and
the sums of the epoch so far.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from mucudnn.arguments import a_function, an_integer, of_type
from mucudnn.backends.base import Backend
from mucudnn.codecs.values import plan_to_dict
from mucudnn.errors import CheckpointError, TrainingError
from mucudnn.runtime.interrupts import deferred_interrupt
from mucudnn.runtime.training.checkpoint import Checkpoint, Checkpoints
from mucudnn.runtime.training.convolution_plans import Plans
from mucudnn.runtime.training.evaluation import Epochs, check_batches, image_and_label
from mucudnn.runtime.training.history import EpochReport, Position, read_resumption
from mucudnn.runtime.training.trainer import StepResult, Trainer

__all__ = ["Batches", "EpochReport", "OnStep", "Position", "fit", "plans_of"]


class Batches(Epochs, Protocol):
    """Epochs of labelled images that have a length, such as a `mucudnn.data.Loader`."""

    def __len__(self) -> int:
        """Batches in an epoch."""
        ...


OnStep = Callable[[Position, EpochReport | None], None]
"""Called after every step, and after an epoch with its report."""


def fit(
    trainer: Trainer,
    batches: Batches,
    test: Batches | None = None,
    *,
    epochs: int,
    max_steps: int | None = None,
    checkpoints: Checkpoints | None = None,
    checkpoint_every: int | None = None,
    words: Mapping[str, Any] | None = None,
    resume: Checkpoint | None = None,
    progress: OnStep | None = None,
) -> tuple[EpochReport, ...]:
    """Train for some epochs.

    Ctrl-C ends it after the current step, with a checkpoint if there is a place for
    one; a second Ctrl-C ends it at once.

    Args:
        trainer: Takes the steps.
        batches: For training; all of the trainer's size.
        test: Evaluated after every epoch.
        epochs: In all, those before a resumed checkpoint included.
        max_steps: End after so many steps of the whole training.
        checkpoints: Where to keep them: one at the end of every epoch and at the end.
        checkpoint_every: Also one after so many steps.
        words: What the checkpoints say of this training.
        resume: Go on from here.
        progress: Told of every step and epoch.

    Returns:
        A report of every epoch, those before `resume` included.

    Raises:
        ValueError: A number is out of range, or there is no batch.
        TrainingError: The loss is infinite or no number.
        CheckpointError: A checkpoint cannot be written, or gone on from.
        KeyboardInterrupt: Ctrl-C, once a checkpoint is written.
    """
    of_type("trainer", trainer, Trainer, "a Trainer")
    check_batches("batches", batches)
    if test is not None:
        check_batches("test", test)
    an_integer("epochs", epochs, least=1)
    counts = {"max_steps": max_steps, "checkpoint_every": checkpoint_every}
    for name, count in counts.items():
        if count is not None:
            an_integer(name, count, least=1)
    for name, value, kind, wanted in (
        ("words", words, Mapping, "a mapping from names to settings"),
        ("checkpoints", checkpoints, Checkpoints, "Checkpoints(folder)"),
        ("resume", resume, Checkpoint, "a Checkpoint, as Checkpoints.load has"),
    ):
        if value is not None:
            of_type(name, value, kind, wanted)
    if progress is not None:
        a_function("progress", progress, "a function of (position, report)")
    if len(batches) == 0:
        raise ValueError("there is no batch to train on")
    run = _Run(trainer, checkpoints, dict(words or {}), progress or (lambda *_: None))
    if resume is not None:
        run.restore(resume, len(batches))
    limit = math.inf if max_steps is None else max_steps
    with deferred_interrupt() as pressed:

        def interrupted() -> bool:
            return trainer.anywhere(pressed())

        while run.at.epoch < epochs and run.at.steps < limit:
            finished = run.epoch(batches, limit, checkpoint_every, interrupted)
            if interrupted():
                run.save()
                raise KeyboardInterrupt
            run.close_epoch(test, whole=finished)
            run.save()
            if interrupted():
                raise KeyboardInterrupt
    return tuple(run.reports)


def plans_of(checkpoint: Checkpoint, backend: Backend) -> Plans:
    """The convolution plans that a checkpoint's training ran with.

    With the same plans it goes on to the same bits; on another device none are known.

    Raises:
        CheckpointError: It does not make sense, or the device has no such algorithms.
    """
    found = read_resumption(checkpoint)
    if found.device != backend.device.fingerprint:
        return {}
    for i, plan in enumerate(found.plans):
        for step in plan.steps:
            micro = plan.problem.with_batch(step.batch)
            known = [name for name, _ in backend.conv.algorithms(micro)]
            if step.algo not in known:
                raise CheckpointError(
                    f"the checkpoint of step {checkpoint.step} cannot be gone on from: "
                    f"plans[{i}]: {backend.device.fingerprint} has no algorithm "
                    f"{step.algo!r} for {micro}; it has {', '.join(known) or 'none'}"
                )
    return {plan.problem: plan for plan in found.plans}


class _Run:
    """What changes while it runs."""

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: Checkpoints | None,
        words: Mapping[str, Any],
        progress: OnStep,
    ) -> None:
        self.at = Position()
        self.reports: list[EpochReport] = []
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._words = words
        self._progress = progress
        self._saved: Position | None = None

    def epoch(
        self,
        batches: Batches,
        limit: float,
        every: int | None,
        interrupted: Callable[[], bool],
    ) -> bool:
        """Take the epoch's steps; whether all of them were taken."""
        device = self._trainer.backend.device
        if self.at.batch == len(batches):
            return True
        start = device.record()
        for batch in batches.epoch(self.at.epoch, self.at.batch):
            result = self._trainer.step(*image_and_label(batch))
            stop = device.record()
            self._check(result)
            self.at = self.at.after(result, device.elapsed_ms(start, stop))
            start = stop
            self._progress(self.at, None)
            if interrupted() or self.at.steps >= limit:
                break
            if every is not None and self.at.steps % every == 0:
                self.save()
                start = device.record()
        return self.at.batch == len(batches)

    def close_epoch(self, test: Batches | None, *, whole: bool) -> None:
        """Evaluate, report, and move to the next epoch if this one is whole."""
        tested = None if test is None else self._trainer.evaluate(test)
        report = self.at.report(tested)
        self.reports.append(report)
        self._progress(self.at, report)
        if whole:
            self.at = Position(epoch=self.at.epoch + 1, steps=self.at.steps)

    def save(self) -> None:
        """Write a checkpoint of this very moment, unless there is one."""
        if self._checkpoints is None or self._saved == self.at:
            return
        whole = [r for r in self.reports if r.epoch < self.at.epoch]
        self._checkpoints.save(
            Checkpoint(
                step=self.at.steps,
                arrays=self._trainer.state.save(),
                words=self._words,
                progress={
                    "position": asdict(self.at),
                    "epochs": [asdict(report) for report in whole],
                    "device": self._trainer.backend.device.fingerprint,
                    "plans": [plan_to_dict(p) for p in self._trainer.plans.values()],
                },
            )
        )
        self._saved = self.at

    def restore(self, checkpoint: Checkpoint, batches: int) -> None:
        """Stand where a checkpoint was written, in epochs of so many batches."""
        found = read_resumption(checkpoint)
        refused = f"the checkpoint of step {checkpoint.step} cannot be gone on from: "
        if found.position.batch > batches:
            raise CheckpointError(
                f"{refused}{found.position.batch} batches of an epoch are done, but it "
                f"has {batches}"
            )
        try:
            self._trainer.state.load(checkpoint.arrays)
        except ValueError as e:
            raise CheckpointError(f"{refused}{e}") from e
        self.at = found.position
        self.reports = [*found.epochs]
        self._trainer.steps = self.at.steps
        self._saved = self.at

    def _check(self, result: StepResult) -> None:
        if not math.isfinite(result.loss):
            raise TrainingError(
                f"the loss is {result.loss} in step {self.at.batch + 1} of epoch "
                f"{self.at.epoch + 1} (step {self.at.steps + 1} of all, learning rate "
                f"{result.learning_rate:g}); a smaller learning rate or a warm-up "
                "often helps",
                epoch=self.at.epoch,
                step=self.at.steps,
            )
