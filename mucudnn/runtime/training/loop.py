"""The loop over epochs: steps, evaluation, checkpoints.

All randomness is derived from seeds and positions, so training resumes bit-exactly from
(epoch, batch). Beside the weights, a checkpoint holds only the position and the sums of
the current epoch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from mucudnn.arguments import check_function, check_integer, check_type
from mucudnn.backends.device import Event
from mucudnn.codecs import encode_fields
from mucudnn.errors import CheckpointError, TrainingError
from mucudnn.processes import deferred_interrupt
from mucudnn.runtime.training.checkpoints import Checkpoint, Checkpoints
from mucudnn.runtime.training.history import (
    EPOCH,
    EVALUATION,
    STEP,
    EpochReport,
    LogEntry,
    OnEntry,
    Position,
    read_resumption,
)
from mucudnn.runtime.training.stepping import (
    Epochs,
    Evaluation,
    StepResult,
    check_batches,
    image_and_label,
)
from mucudnn.runtime.training.trainer import Trainer


class Batches(Epochs, Protocol):
    """Epochs of labelled images with a length, such as a `mucudnn.data.Loader`."""

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""


OnStep = Callable[[Position, EpochReport | None], None]
"""Called after every step, and after every epoch with its report."""

Handover = tuple[Trainer, Batches, Batches | None]
"""A new trainer with the state of the current one, and its training and test data."""

Between = Callable[[], Handover | None]
"""Called between epochs; returns a trainer that takes over, None to keep this one."""


def fit(
    trainer: Trainer,
    batches: Batches,
    test: Batches | None = None,
    *,
    epochs: int,
    max_steps: int | None = None,
    checkpoints: Checkpoints | None = None,
    checkpoint_every: int | None = None,
    eval_every: int | None = None,
    words: Mapping[str, Any] | None = None,
    resume: Checkpoint | None = None,
    progress: OnStep | None = None,
    log: OnEntry | None = None,
    between: Between | None = None,
) -> tuple[EpochReport, ...]:
    """Train for some epochs.

    Ctrl-C ends the training after the current step, with a checkpoint if `checkpoints`
    is given; a second Ctrl-C ends it at once.

    Args:
        trainer: Takes the steps.
        batches: Training data in batches of the trainer's size.
        test: Test data, evaluated after every epoch.
        epochs: Number of epochs, those before a resumed checkpoint included.
        max_steps: Maximum number of steps of the whole training.
        checkpoints: Storage of checkpoints, written after every epoch and at the end.
        checkpoint_every: Also write one every so many steps.
        eval_every: Also evaluate every so many steps.
        words: Settings that identify the training in checkpoints.
        resume: Checkpoint to resume from.
        progress: Called after every step and epoch.
        log: Called with every entry, such as a `LogFile`.
        between: Called between epochs; may return another trainer to continue with.

    Returns:
        Reports of all epochs, those before `resume` included.

    Raises:
        ValueError: A number is out of range, or there is no batch.
        TrainingError: The loss is not finite.
        CheckpointError: A checkpoint cannot be written or resumed from.
        KeyboardInterrupt: Ctrl-C, after the checkpoint is written.
    """
    # Validate every argument before the first step changes a weight.
    counts = {
        "epochs": epochs,
        "max_steps": max_steps,
        "checkpoint_every": checkpoint_every,
        "eval_every": eval_every,
    }
    functions = {
        "progress": (progress, "a function of (position, report)"),
        "log": (log, "a function of a LogEntry, such as a LogFile"),
        "between": (between, "a function of nothing"),
    }
    check_type("trainer", trainer, Trainer, "a Trainer")
    check_batches("batches", batches)
    if test is not None:
        check_batches("test", test)
    for name, count in counts.items():
        if count is not None or name == "epochs":
            check_integer(name, count, least=1)
    if eval_every is not None and test is None:
        raise ValueError("eval_every needs the argument test: images to evaluate on")
    if len(batches) == 0:
        raise ValueError("there is no batch to train on")
    for name, value, kind, wanted in (
        ("words", words, Mapping, "a mapping from names to settings"),
        ("checkpoints", checkpoints, Checkpoints, "Checkpoints(folder)"),
        ("resume", resume, Checkpoint, "a Checkpoint, as Checkpoints.load has"),
    ):
        if value is not None:
            check_type(name, value, kind, wanted)
    for name, (function, wanted) in functions.items():
        if function is not None:
            check_function(name, function, wanted)
    # Ranks that would take different numbers of steps would wait forever.
    trainer.check_alike({**counts, "batches": len(batches), **(words or {})})
    run = _Run(
        trainer,
        checkpoints,
        dict(words or {}),
        progress or (lambda *_: None),
        log or (lambda _: None),
        test if eval_every else None,
        eval_every or 1,
    )
    if resume is not None:
        run.restore(resume, len(batches))
    limit = math.inf if max_steps is None else max_steps
    # Ctrl-C ends the loop between two steps, when weights and logs agree.
    with deferred_interrupt() as pressed:

        def interrupted() -> bool:
            return run.trainer.any_rank(pressed())

        while run.at.epoch < epochs and run.at.steps < limit:
            finished = run.epoch(batches, limit, checkpoint_every, interrupted)
            # The epoch stays open, so that a resumed training finishes it.
            if interrupted():
                run.save()
                raise KeyboardInterrupt
            run.close_epoch(test, whole=finished)
            run.save()
            # Ctrl-C may also come during the evaluation.
            if interrupted():
                raise KeyboardInterrupt
            going_on = finished and run.at.epoch < epochs and run.at.steps < limit
            if between is not None and going_on and (other := between()) is not None:
                batches, test = run.hand_over(other)
    return tuple(run.reports)


@dataclass(slots=True)
class _Run:
    """Mutable state of one call of `fit`."""

    trainer: Trainer
    checkpoints: Checkpoints | None
    words: Mapping[str, Any]
    progress: OnStep
    log: OnEntry
    test: Batches | None
    eval_every: int
    at: Position = field(default_factory=Position)
    reports: list[EpochReport] = field(default_factory=list)
    _tested: tuple[int, Evaluation] | None = None
    _saved: Position | None = None
    _pending: tuple[StepResult, Event, Event] | None = None

    def epoch(
        self,
        batches: Batches,
        limit: float,
        every: int | None,
        interrupted: Callable[[], bool],
    ) -> bool:
        """Take the steps of the epoch; return whether all of them were taken."""
        device = self.trainer.backend.device
        self._evaluate()  # the run to resume from may have stopped before this
        if self.at.batch == len(batches):
            return True
        start = device.record()
        for batch in batches.epoch(self.at.epoch, self.at.batch):
            result = self.trainer.step(*image_and_label(batch))
            stop = device.record()
            # Read a result only after the next step is launched, so that the device
            # never idles.
            self._read_pending()
            self._pending = result, start, stop
            start = stop
            launched = self.at.steps + 1
            due = every is not None and launched % every == 0
            tested = self.test is not None and launched % self.eval_every == 0
            if due or tested or launched >= limit or result.ready:
                self._read_pending()
            if interrupted():
                break
            if tested and self._evaluate():
                start = device.record()
            if launched >= limit:
                break
            if due:
                self.save()
                start = device.record()
        self._read_pending()
        return self.at.batch == len(batches)

    def _read_pending(self) -> None:
        """Read the result of the last step, if that is pending."""
        if self._pending is None:
            return
        (result, start, stop), self._pending = self._pending, None
        if not math.isfinite(result.loss):
            raise TrainingError(
                f"the loss is {result.loss} in step {self.at.batch + 1} of epoch "
                f"{self.at.epoch + 1} (step {self.at.steps + 1} of all, learning rate "
                f"{result.learning_rate:g}); a smaller learning rate or a warm-up "
                "often helps",
                epoch=self.at.epoch,
                step=self.at.steps,
            )
        ms = self.trainer.backend.device.elapsed_ms(start, stop)
        self.at = self.at.after(result, ms)
        self.progress(self.at, None)
        self._log(
            STEP,
            loss=result.loss,
            accuracy=result.correct / max(1, result.labels),
            images_per_s=result.images / ms * 1e3 if ms else 0.0,
            learning_rate=result.learning_rate,
        )

    def _log(self, kind: str, **figures: float | None) -> None:
        self.log(LogEntry(kind, self.at.steps, self.at.epoch + 1, **figures))

    def close_epoch(self, test: Batches | None, *, whole: bool) -> None:
        """Evaluate and report the epoch; move to the next if this one is whole."""
        tested = None
        if self._tested is not None and self._tested[0] == self.at.steps:
            tested = self._tested[1]
        elif test is not None:
            tested = self.trainer.evaluate(test)
        report = self.at.report(tested)
        self.reports.append(report)
        self.progress(self.at, report)
        figures = asdict(report)
        del figures["epoch"]  # entries count epochs from 1
        self._log(EPOCH, **figures)
        if whole:
            self.at = Position(epoch=self.at.epoch + 1, steps=self.at.steps)

    def _evaluate(self) -> bool:
        """Evaluate if that is due at this step; return whether it was."""
        due = self.at.batch > 0 and self.at.steps % self.eval_every == 0
        if self.test is None or not due:
            return False
        found = self.trainer.evaluate(self.test)
        self._tested = self.at.steps, found
        self._log(EVALUATION, test_loss=found.loss, test_accuracy=found.accuracy)
        return True

    def hand_over(self, other: Handover) -> tuple[Batches, Batches | None]:
        """Continue with another trainer; return its training and test data."""
        self.trainer, batches, test = other
        self.test = None if self.test is None else test
        return batches, test

    def save(self) -> None:
        if self.checkpoints is None or self._saved == self.at:
            return
        # The report of an unfinished epoch is made again when it is complete.
        whole = [r for r in self.reports if r.epoch < self.at.epoch]
        races = [
            {"raced": raced, "first_ms": first, "second_ms": second}
            for raced, (first, second) in self.trainer.races.items()
        ]
        self.checkpoints.save(
            Checkpoint(
                step=self.at.steps,
                arrays=self.trainer.state.save(),
                words=self.words,
                progress={
                    "position": asdict(self.at),
                    "epochs": [asdict(report) for report in whole],
                    "device": self.trainer.backend.device.fingerprint,
                    "plans": [encode_fields(p) for p in self.trainer.plans.values()],
                    **({"races": races} if races else {}),
                },
            )
        )
        self._saved = self.at

    def restore(self, checkpoint: Checkpoint, batches: int) -> None:
        """Resume from a checkpoint, in epochs of so many batches."""
        found = read_resumption(checkpoint)
        refused = f"the checkpoint of step {checkpoint.step} cannot be resumed from: "
        if found.position.batch > batches:
            raise CheckpointError(
                f"{refused}{found.position.batch} batches of an epoch are done, but it "
                f"has {batches}"
            )
        try:
            self.trainer.state.load(checkpoint.arrays)
        except ValueError as e:
            raise CheckpointError(f"{refused}{e}") from e
        self.at = found.position
        self.reports = [*found.epochs]
        self.trainer.steps = self.at.steps
        self._saved = self.at
