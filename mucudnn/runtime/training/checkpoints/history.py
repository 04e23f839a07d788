"""Progress of a training: position, epoch reports, and how a checkpoint stores them.

Everything read from a checkpoint is validated. A checksum detects damage, but not files
that were edited, mixed up, or written by other programs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mucudnn.codecs.rows import check_times, decode_race
from mucudnn.codecs.values import decode, list_of, members_of, object_of, plan_from_dict
from mucudnn.errors import CheckpointError
from mucudnn.ir.conv import ConvPlan
from mucudnn.runtime.training.checkpoints.checkpoint import Checkpoint
from mucudnn.runtime.training.evaluation import Evaluation
from mucudnn.runtime.training.step.result import StepResult

__all__ = ["EpochReport", "Position", "Resumption", "race_rows", "read_resumption"]

_MEMBERS = ("position", "epochs", "device", "plans")
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


def race_rows(races: Mapping[str, tuple[float, float]]) -> list[dict[str, Any]]:
    """Return races in the form in which a checkpoint stores them."""
    return [
        {"raced": raced, "first_ms": first, "second_ms": second}
        for raced, (first, second) in races.items()
    ]


def read_resumption(checkpoint: Checkpoint) -> Resumption:
    """Read the progress of a checkpoint.

    Raises:
        CheckpointError: A member is missing, has a wrong type, or is inconsistent.
    """
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
    return Resumption(
        position,
        reports,
        decode("device", str, device),
        tuple(_plan(i, plan) for i, plan in enumerate(list_of("plans", plans))),
        dict(_race(i, race) for i, race in enumerate(list_of("races", races))),
    )


def _decoded(where: str, kind: Any, data: object) -> Any:
    """Decode a dataclass of non-negative numbers."""
    names = tuple(field.name for field in fields(kind))
    members = dict(zip(names, members_of(where, data, names), strict=True))
    values = {}
    for field in fields(kind):
        name, value = field.name, members[field.name]
        finite = not isinstance(value, float) or math.isfinite(value)
        if name in _TEST_RESULTS and (value is None or not finite):
            values[name] = value
            continue
        wanted = int if field.type is int else float
        values[name] = decode(f"{where}.{name}", wanted, value)
        if values[name] < 0 and name != "loss" and name not in _TEST_RESULTS:
            raise ValueError(f"{where}.{name}: {value} is below 0")
    return kind(**values)


def _race(index: int, data: object) -> tuple[str, tuple[float, float]]:
    where = f"races[{index}]"
    row = {**object_of(where, data), "measured_at": 0.0}
    found = decode_race(where, "", row)
    return found.raced, found.times_ms


def _plan(index: int, data: object) -> ConvPlan:
    where = f"plans[{index}]"
    try:
        plan = plan_from_dict(data)
        for i, step in enumerate(plan.steps):
            check_times(f"steps[{i}]", step)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from e
    failed = next((step for step in plan.steps if step.error is not None), None)
    if failed is not None:
        raise ValueError(f"{where}: {failed.algo} failed ({failed.error})")
    return plan
