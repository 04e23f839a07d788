"""Convert options of `mucudnn train` into arguments of a `Trainer`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mucudnn.cli.app import BadInputError, bad_input
from mucudnn.ir.loss_scaling import DYNAMIC
from mucudnn.ir.optimizers import Momentum, Optimizer, parse_optimizer

if TYPE_CHECKING:
    from mucudnn.backends.base import Device
    from mucudnn.cli.training.data import Work
    from mucudnn.runtime.training.budget import MemoryBudget

__all__ = ["budget_of", "optimizer_of", "total_steps", "words_of"]


def budget_of(settings: Mapping[str, Any], device: "Device") -> "MemoryBudget | None":
    """Return the memory budget on a device; None without one."""
    from mucudnn.runtime.training.budget import DEVICE, MemoryBudget

    nbytes = settings["budget"]
    if nbytes is None:
        return None
    return MemoryBudget(
        nbytes=device.available_bytes() if nbytes == DEVICE else nbytes,
        policy=settings["policy"],
        scheduler=settings["scheduler"],
        convolutions=settings["convolutions"],
        disk=None if settings["disk"] is None else Path(settings["disk"]),
        tiers=settings["tiers"],
    )


def optimizer_of(settings: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer with its settings."""
    with bad_input():
        optimizer = parse_optimizer(
            settings["optimizer"],
            learning_rate=settings["lr"],
            weight_decay=settings["weight_decay"],
        )
    momentum = settings["momentum"]
    if momentum is None:
        return optimizer
    if not isinstance(optimizer, Momentum):
        raise BadInputError(f"{settings['optimizer']} takes no --momentum")
    return replace(optimizer, momentum=momentum)


def total_steps(work: "Work", settings: Mapping[str, Any]) -> int:
    """Return the number of steps of the whole training."""
    total: int = settings["epochs"] * len(work.batches)
    return min(total, settings["steps"] or total)


def words_of(
    work: "Work", optimizer: Optimizer, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that a checkpoint must agree with to be resumed.

    A cosine schedule depends on the last step; other schedules may be extended.
    """
    schedule = settings["lr_schedule"]
    return {
        **work.words,
        "optimizer": repr(optimizer),
        "lr_schedule": schedule,
        "warmup": settings["warmup"],
        **({"loss_scale": DYNAMIC} if settings["loss_scale"] == DYNAMIC else {}),
        **({"steps": total_steps(work, settings)} if schedule == "cosine" else {}),
    }
