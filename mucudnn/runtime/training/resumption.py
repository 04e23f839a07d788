"""Where a checkpoint says that its training stood, checked before it is believed.

A checksum tells damage from what was written, not what was written from what makes
sense: files are edited, mixed up, or made by other programs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mucudnn.codecs.rows import check_times
from mucudnn.codecs.values import decode, list_of, members_of, plan_from_dict
from mucudnn.errors import CheckpointError
from mucudnn.ir.conv import ConvPlan
from mucudnn.runtime.training.checkpoint import Checkpoint
from mucudnn.runtime.training.history import EpochReport, Position

__all__ = ["Resumption", "read_resumption"]

_MEMBERS = ("position", "epochs", "device", "plans")
_FOUND = ("test_loss", "test_accuracy")
"""Of the test images; unlike a loss of training they may be no number."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """What training goes on from, beside the arrays.

    Attributes:
        position: Where it stood.
        epochs: Reports of all epochs before.
        device: Fingerprint of the one it ran on.
        plans: Convolution plans it ran with.
    """

    position: Position
    epochs: tuple[EpochReport, ...]
    device: str
    plans: tuple[ConvPlan, ...]


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
    at, epochs, device, plans = members_of(
        "progress", dict(checkpoint.progress), _MEMBERS
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
    )


def _decoded(where: str, kind: Any, data: object) -> Any:
    """A dataclass of numbers, none of which is negative."""
    names = tuple(field.name for field in fields(kind))
    members: Mapping[str, Any] = dict(
        zip(names, members_of(where, data, names), strict=True)
    )
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
