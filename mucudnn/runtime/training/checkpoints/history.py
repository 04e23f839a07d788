"""Where training stands, what it has found so far, and how a checkpoint says so.

What a checkpoint says is checked before it is believed. A checksum tells damage from
what was written, not what was written from what makes sense: files are edited, mixed
up, or made by other programs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mucudnn.codecs.rows import check_times, decode_race
from mucudnn.codecs.values import (
    decode,
    list_of,
    members_of,
    object_of,
    plan_from_dict,
)
from mucudnn.errors import CheckpointError
from mucudnn.ir.conv import ConvPlan
from mucudnn.runtime.training.checkpoints.checkpoint import Checkpoint
from mucudnn.runtime.training.evaluation import Evaluation
from mucudnn.runtime.training.step.result import StepResult

__all__ = ["EpochReport", "Position", "Resumption", "race_rows", "read_resumption"]

_MEMBERS = ("position", "epochs", "device", "plans")
_FOUND = ("test_loss", "test_accuracy")
"""Of the test images; unlike a loss of training they may be no number."""


@dataclass(frozen=True, slots=True)
class EpochReport:
    """What came of an epoch.

    Attributes:
        epoch: From 0.
        loss: Mean over the training images, each as the step that saw it found it.
        accuracy: Share of right answers, likewise.
        test_loss: Mean over the test images with the weights at the end; None if
            nothing was evaluated.
        test_accuracy: Share of right answers, likewise.
        images_per_s: Training images a second, waiting for data included.
        learning_rate: Of the last step.
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
    """Where training stands, and the sums of the epoch so far.

    Attributes:
        epoch: The current one, from 0.
        batch: Batches of it that are done.
        steps: Steps of the whole training that are done.
        loss: Sum over the labels seen in this epoch.
        correct: Right answers among them.
        labels: How many labels; an image has one, or one a pixel.
        images: How many images.
        ms: Time that this epoch took so far.
        learning_rate: Of the last step.
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
        """One step further, `ms` later."""
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
        """What has come of the epoch so far."""
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
        """Share of right answers in this epoch so far."""
        return self.correct / max(1, self.labels)

    @property
    def images_per_s(self) -> float:
        """Training images a second in this epoch so far; 0 where no time passed."""
        return self.images / self.ms * 1e3 if self.ms else 0.0


@dataclass(frozen=True, slots=True)
class Resumption:
    """What training goes on from, beside the arrays.

    Attributes:
        position: Where it stood.
        epochs: Reports of all epochs before.
        device: Fingerprint of the one it ran on.
        plans: Convolution plans it ran with.
        races: What its kernels were chosen by: ms of two, by what was raced.
    """

    position: Position
    epochs: tuple[EpochReport, ...]
    device: str
    plans: tuple[ConvPlan, ...]
    races: Mapping[str, tuple[float, float]]


def race_rows(races: Mapping[str, tuple[float, float]]) -> list[dict[str, Any]]:
    """What kernels were chosen by, as a checkpoint says it."""
    return [
        {"raced": raced, "first_ms": first, "second_ms": second}
        for raced, (first, second) in races.items()
    ]


def read_resumption(checkpoint: Checkpoint) -> Resumption:
    """The progress of a checkpoint.

    Raises:
        CheckpointError: Something is missing, of another type, or contradicts the rest.
    """
    try:
        return _read(checkpoint)
    except ValueError as e:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} cannot be gone on from: {e}"
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
    """A dataclass of numbers, none of which is negative."""
    names = tuple(field.name for field in fields(kind))
    members = dict(zip(names, members_of(where, data, names), strict=True))
    values = {}
    for field in fields(kind):
        name, value = field.name, members[field.name]
        if name in _FOUND and (value is None or _odd(value)):
            values[name] = value
            continue
        wanted = int if field.type is int else float
        values[name] = decode(f"{where}.{name}", wanted, value)
        if values[name] < 0 and name != "loss" and name not in _FOUND:
            raise ValueError(f"{where}.{name}: {value} is below 0")
    return kind(**values)


def _race(index: int, data: object) -> tuple[str, tuple[float, float]]:
    where = f"races[{index}]"
    row = {**object_of(where, data), "measured_at": 0.0}
    found = decode_race(where, "", row)
    return found.raced, found.times_ms


def _odd(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


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
