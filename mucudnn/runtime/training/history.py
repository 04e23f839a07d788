"""Position, log and history of a training, and how a checkpoint resumes them.

Everything read from a checkpoint is validated. A checksum detects damage, but not files
that were edited, mixed up, or written by other programs.
"""

import csv
import io
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

from mucudnn.backends.base import Backend
from mucudnn.codecs import (
    decode,
    decode_fields,
    decode_members,
    list_of,
    members_of,
)
from mucudnn.errors import CheckpointError
from mucudnn.files import write_whole
from mucudnn.ir.conv import ConvPlan
from mucudnn.runtime.training.checkpoints import Checkpoint
from mucudnn.runtime.training.planned_steps import Plans
from mucudnn.runtime.training.stepping import Evaluation, StepResult
from mucudnn.runtime.tuning.tuner import Tuner

_MEMBERS = ("position", "epochs", "device", "plans")
_RACE = {"raced": str, "first_ms": float, "second_ms": float}

_TEST_RESULTS = ("test_loss", "test_accuracy")
"""Results on test images, which may be missing or not finite."""


@dataclass(frozen=True, slots=True)
class EpochReport:
    """Results of one epoch.

    Attributes:
        epoch: Number of the epoch, from 0.
        loss: Mean over the training images, each as of its own step.
        accuracy: Share of correct answers, likewise.
        test_loss: Mean over the test images with the final weights; None if not
            evaluated.
        test_accuracy: Share of correct answers, likewise.
        images_per_s: Training images per second, waiting for data included.
        learning_rate: Learning rate of the last step.
    """

    epoch: int
    loss: float
    accuracy: float
    test_loss: float | None
    test_accuracy: float | None
    images_per_s: float
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a training, and the sums of the current epoch.

    Attributes:
        epoch: Current epoch, from 0.
        batch: Number of finished batches of this epoch.
        steps: Number of finished steps of the whole training.
        loss: Sum of the loss over the labels of this epoch.
        correct: Number of correct answers in this epoch.
        labels: Number of labels; an image has one, or one per pixel.
        images: Number of images.
        ms: Time of this epoch so far.
        learning_rate: Learning rate of the last step.
    """

    epoch: int = 0
    batch: int = 0
    steps: int = 0
    loss: float = 0.0
    correct: int = 0
    labels: int = 0
    images: int = 0
    ms: float = 0.0
    learning_rate: float = 0.0

    def after(self, result: StepResult, ms: float) -> "Position":
        """Return the position one step later, which took `ms`."""
        return replace(
            self,
            batch=self.batch + 1,
            steps=self.steps + 1,
            loss=self.loss + result.loss * result.labels,
            correct=self.correct + result.correct,
            labels=self.labels + result.labels,
            images=self.images + result.images,
            ms=self.ms + ms,
            learning_rate=result.learning_rate,
        )

    def report(self, tested: Evaluation | None) -> EpochReport:
        """Return the report of the epoch so far."""
        return EpochReport(
            epoch=self.epoch,
            loss=self.mean_loss,
            accuracy=self.accuracy,
            test_loss=None if tested is None else tested.loss,
            test_accuracy=None if tested is None else tested.accuracy,
            images_per_s=self.images_per_s,
            learning_rate=self.learning_rate,
        )

    @property
    def mean_loss(self) -> float:
        """Mean loss of this epoch so far."""
        return self.loss / max(1, self.labels)

    @property
    def accuracy(self) -> float:
        """Share of correct answers in this epoch so far."""
        return self.correct / max(1, self.labels)

    @property
    def images_per_s(self) -> float:
        """Training images per second in this epoch; 0 where no time passed."""
        return self.images / self.ms * 1e3 if self.ms else 0.0


@dataclass(frozen=True, slots=True)
class Resumption:
    """Progress of a checkpoint, beside its arrays.

    Attributes:
        position: Position of the training.
        epochs: Reports of all finished epochs.
        device: Fingerprint of the training's device.
        plans: Convolution plans of the training.
        races: Race -> ms of both candidates, by which kernels were chosen.
    """

    position: Position
    epochs: tuple[EpochReport, ...]
    device: str
    plans: tuple[ConvPlan, ...]
    races: Mapping[str, tuple[float, float]]


def read_resumption(checkpoint: Checkpoint) -> Resumption:
    """Read the progress of a checkpoint."""
    try:
        return _read(checkpoint)
    except ValueError as e:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} cannot be resumed from: {e}"
        ) from e


def _read(checkpoint: Checkpoint) -> Resumption:
    at, epochs, device, plans, races = members_of(
        "progress", dict(checkpoint.progress), _MEMBERS, {"races": []}
    )
    # A position that contradicts itself would resume from the wrong batch.
    position: Position = _decoded("position", Position, at)
    if position.steps != checkpoint.step:
        raise ValueError(
            f"position.steps: {position.steps} is not the checkpoint's step"
        )
    for less, more in (
        ("batch", "steps"),
        ("epoch", "steps"),
        ("correct", "labels"),
        ("images", "labels"),
    ):
        if getattr(position, less) > getattr(position, more):
            raise ValueError(
                f"position: {getattr(position, less)} {less} are more than "
                f"{getattr(position, more)} {more}"
            )
    # Reports of all epochs before it, in order.
    reports = tuple(
        _decoded(f"epochs[{i}]", EpochReport, report)
        for i, report in enumerate(list_of("epochs", epochs))
    )
    numbers = [report.epoch for report in reports]
    if numbers != [*range(position.epoch)]:
        raise ValueError(
            f"epochs: reports of {len(numbers)} epochs, not of the {position.epoch} "
            "before this one, in order"
        )
    found: dict[str, tuple[float, float]] = {}
    for i, row in enumerate(list_of("races", races)):
        raced, *times = decode_members(f"races[{i}]", row, _RACE)
        found[raced] = times[0], times[1]
    return Resumption(
        position,
        reports,
        decode("device", str, device),
        tuple(_plan(i, plan) for i, plan in enumerate(list_of("plans", plans))),
        found,
    )


def _decoded(where: str, kind: Any, data: object) -> Any:
    """Decode a dataclass of non-negative numbers."""
    names = tuple(field.name for field in fields(kind))
    members = dict(zip(names, members_of(where, data, names), strict=True))
    values = {}
    for field in fields(kind):
        name, value = field.name, members[field.name]
        # Results of tests may be missing or not finite, other numbers may not.
        finite = not isinstance(value, float) or math.isfinite(value)
        if name in _TEST_RESULTS and (value is None or not finite):
            values[name] = value
            continue
        wanted = int if field.type is int else float
        values[name] = decode(f"{where}.{name}", wanted, value)
        if values[name] < 0 and name != "loss" and name not in _TEST_RESULTS:
            raise ValueError(f"{where}.{name}: {value} is below 0")
    return kind(**values)


def _plan(index: int, data: object) -> ConvPlan:
    where = f"plans[{index}]"
    plan = decode_fields(where, ConvPlan, data)
    failed = next((step for step in plan.steps if step.error is not None), None)
    if failed is not None:
        raise ValueError(f"{where}: {failed.algo} failed ({failed.error})")
    return plan


# A line is written as soon as its entry is available, so a killed run loses at most the
# current line. A resumed training repeats some steps; their old lines are removed
# first.


STEP, EVALUATION, EPOCH = "step", "evaluation", "epoch"


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Results of one step, evaluation or epoch; for the numbers see `EpochReport`.

    Attributes:
        kind: `step`, with results of one batch; `evaluation`, with results of the test
            images only; `epoch`, with means over an epoch.
        step: Number of finished steps of the whole training.
        epoch: Current epoch, from 1.
    """

    kind: str
    step: int
    epoch: int
    loss: float | None = None
    accuracy: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    images_per_s: float | None = None
    learning_rate: float | None = None

    def before(self, at: Position) -> bool:
        """Return whether a training resumed at `at` does not repeat this entry."""
        if at.batch == 0:
            return self.step <= at.steps
        return self.step < at.steps or (self.step == at.steps and self.kind == STEP)


OnEntry = Callable[[LogEntry], None]
"""Called with every entry."""

_NAMES = tuple(field.name for field in fields(LogEntry))
_SUFFIXES = (".csv", ".jsonl", ".ndjson")


class LogFile:
    """A log of a training as comma-separated values or JSON lines.

    Numbers that are not finite (a diverged loss) are `nan` or `inf` in CSV and null in
    JSON.

    Args:
        path: File name that ends in .csv, .jsonl or .ndjson.
        since: Position at which training resumes; without it an existing file is
            replaced.
    """

    def __init__(self, path: Path | str, *, since: Position | None = None) -> None:
        self._path = Path(path)
        suffix = self._path.suffix.lower()
        if suffix not in _SUFFIXES:
            valid = ", ".join(_SUFFIXES)
            raise ValueError(f"{path}: a log must end in {valid}")
        self._is_csv = suffix == ".csv"
        self._head = _write_csv(_NAMES) if self._is_csv else ""
        self._kept = "" if since is None else self._lines_before(since)
        self._file: IO[str] | None = None
        self._failed = False

    def __call__(self, entry: LogEntry) -> None:
        """Write a line.

        On a full disk logging stops with a warning; training continues.
        """
        if self._failed:
            return
        try:
            self._opened().write(self._line(entry))
            self._opened().flush()
        except OSError as e:
            self._failed = True
            warnings.warn(
                f"cannot write the log {self._path}: {e.strerror or e}; training "
                "continues without it",
                stacklevel=2,
            )

    def close(self) -> None:
        """Close the file."""
        if self._file is not None and not self._failed:
            self._file.close()

    def _opened(self) -> IO[str]:
        if self._file is None:
            write_whole(self._path, (self._head + self._kept).encode())
            self._file = self._path.open("a", encoding="utf-8", newline="")
        return self._file

    def _lines_before(self, since: Position) -> str:
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as e:
            raise CheckpointError(f"cannot continue the log {self._path}: {e}") from e
        body = text.removeprefix(self._head)
        whole, _, _ = body.rpartition("\n")  # drop a line cut off by a kill
        try:
            entries = [self._entry(line) for line in whole.splitlines()]
            kept = [entry for entry in entries if entry.before(since)]
        except (ValueError, TypeError, KeyError) as e:
            raise CheckpointError(
                f"{self._path} is not a log of this training: {e}; name another file"
            ) from e
        return "".join(map(self._line, kept))

    def _line(self, entry: LogEntry) -> str:
        values = asdict(entry)
        if self._is_csv:
            return _write_csv(values.values())
        finite = {
            name: None if isinstance(v, float) and not math.isfinite(v) else v
            for name, v in values.items()
        }
        return json.dumps(finite, allow_nan=False) + "\n"

    def _entry(self, line: str) -> LogEntry:
        if not self._is_csv:
            values = json.loads(line)
            return LogEntry(**{name: values[name] for name in _NAMES})
        (words,) = csv.reader([line])
        kind, step, epoch, *numbers = words
        read = dict(zip(_NAMES[3:], numbers, strict=True))
        figures = {name: float(word) for name, word in read.items() if word}
        return LogEntry(kind, int(step), int(epoch), **figures)


def _write_csv(values: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def plans_of(checkpoint: Checkpoint, backend: Backend) -> Plans:
    """Return the convolution plans that a checkpoint's training used.

    The same plans give bit-identical results. On another device none apply.

    Raises:
        CheckpointError: The progress is not valid, or the device lacks an algorithm.
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
                    f"the checkpoint of step {checkpoint.step} cannot be resumed from: "
                    f"plans[{i}]: {backend.device.fingerprint} has no algorithm "
                    f"{step.algo!r} for {micro}; it has {', '.join(known) or 'none'}"
                )
    return {plan.problem: plan for plan in found.plans}


def recall_races(checkpoint: Checkpoint, tuner: Tuner) -> None:
    """Write the races of a checkpoint's training to a tuner's cache.

    They replace other results, so that a trainer makes the same choices. On another
    device none apply.

    Raises:
        CheckpointError: The progress is not valid.
    """
    found, device = read_resumption(checkpoint), tuner.backend.device.fingerprint
    if found.device == device:
        for raced, times in found.races.items():
            tuner.cache.put_race(device, raced, times, replace=True)
