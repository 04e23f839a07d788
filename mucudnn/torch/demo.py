"""The third act of the demonstration: somebody else's model, in a budget."""

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import nn

from mucudnn.ir.sizes import format_bytes
from mucudnn.torch.memory_study import memory
from mucudnn.torch.step import train_step
from mucudnn.torch.step_plan import TorchPlan

__all__ = ["TorchAct", "small_torch_step"]

_BATCH, _IMAGE, _STEPS, _WARM = 8, 64, 12, 4
_SHARE = 0.25
"""Of the way from the least budget that works to what no limit would take."""


@dataclass(frozen=True, slots=True)
class TorchAct:
    """A PyTorch step by eager mode, and within a budget.

    Attributes:
        name: What was trained.
        whole: The step without a limit, planned.
        forecast: The step within its budget, before it was run.
        budget: Bytes.
        peak_bytes: What it was planned to have in use when it was run.
        whole_ms: A step's time in eager mode.
        step_ms: The planned one's.
        same: Whether all losses were equal to the last bit.
    """

    name: str
    whole: TorchPlan
    forecast: TorchPlan
    budget: int
    peak_bytes: int
    whole_ms: float
    step_ms: float
    same: bool


def small_torch_step(say: Callable[[str], None]) -> TorchAct:
    """Train a few steps by PyTorch's own loop, then the same in a budget."""
    name, model = _model()
    images = torch.randn(_BATCH, 3, _IMAGE, _IMAGE)
    labels = torch.randint(0, 10, (_BATCH,))
    mine = copy.deepcopy(model)
    say(f"capturing {name} as it is trained")
    loss_fn = nn.functional.cross_entropy
    study = memory(model, loss_fn, (images, labels), _optimizer(model), device="cpu")
    most, least = study.unlimited_bytes, study.least_budget
    budget = least + int(_SHARE * (most - least))
    say(f"training it by PyTorch, then within {format_bytes(budget)}")
    whole = study.plan()
    optimizer = _optimizer(model)

    def eager() -> float:
        optimizer.zero_grad()
        loss = loss_fn(model(images), labels)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    step = train_step(mine, loss_fn, _optimizer(mine), budget=budget)
    losses, whole_ms = _timed(eager)
    again, step_ms = _timed(lambda: float(step(images, labels).item()))
    return TorchAct(
        name=f"{name}, {_BATCH} images of {_IMAGE}×{_IMAGE}",
        whole=whole,
        forecast=study.plan(budget),
        budget=budget,
        peak_bytes=step.plan.peak_bytes,
        whole_ms=whole_ms,
        step_ms=step_ms,
        same=losses == again,
    )


def _model() -> tuple[str, nn.Module]:
    """torchvision's ResNet-18 where it is installed, else a small network."""
    torch.manual_seed(0)
    try:
        models = import_module("torchvision.models")
    except (ImportError, RuntimeError):  # a build for another PyTorch raises the latter
        return "a small network in PyTorch", nn.Sequential(
            *_block(3, 32),
            *_block(32, 32),
            nn.MaxPool2d(2),
            *_block(32, 64),
            *_block(64, 64),
            nn.MaxPool2d(2),
            *_block(64, 128),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 10),
        )
    return "torchvision's ResNet-18", models.resnet18(num_classes=10)


def _block(channels: int, out: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _timed(step: Callable[[], float]) -> tuple[list[float], float]:
    """Losses of a few steps, and their median ms once they are warm."""
    losses, times = [], []
    for _ in range(_STEPS):
        start = time.perf_counter()
        losses.append(step())
        times.append(1e3 * (time.perf_counter() - start))
    return losses, statistics.median(times[_WARM:])
