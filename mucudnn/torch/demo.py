"""The third act of the demonstration: a PyTorch model within a memory budget."""

import copy
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from mucudnn.backends import get_backend
from mucudnn.ir.sizes import format_bytes
from mucudnn.runtime.tuning.timing import StoppingRule, measure_together
from mucudnn.torch.memory_study import memory
from mucudnn.torch.step import train_step

_BATCH, _IMAGE, _WARM = 8, 64, 2
_TURNS = StoppingRule(min_samples=8, max_samples=30, budget_ms=2500.0)
_SHARE = 0.25
"""Budget, as a share of the way from the minimum feasible one to the unlimited peak."""


def small_torch_step(say: Callable[[str], None]) -> dict[str, Any]:
    """Train by PyTorch's own loop, by a planned step, and by one within a budget.

    Returns:
        The fields of a `StepAct`.
    """
    name, model = _model()
    images = torch.randn(_BATCH, 3, _IMAGE, _IMAGE)
    labels = torch.randint(0, 10, (_BATCH,))
    loss_fn = nn.functional.cross_entropy
    say(f"capturing {name} as it is trained")
    study = memory(model, loss_fn, (images, labels), _optimizer(model), device="cpu")
    most, least = study.unlimited_bytes, study.least_budget
    budget = least + int(_SHARE * (most - least))
    say(f"planning it without a limit, and within {format_bytes(budget)}")
    # Each step has a copy, so that all of them start from the same weights.
    copies = copy.deepcopy(model), copy.deepcopy(model)
    free, bounded = (
        train_step(mine, loss_fn, _optimizer(mine), budget=limit)
        for mine, limit in zip(copies, (None, budget), strict=True)
    )
    plans = [step.prepare(images, labels) for step in (free, bounded)]
    say("training by PyTorch, planned, and within the budget, in turn")
    optimizer = _optimizer(model)

    def eager(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    losses: tuple[list[float], ...] = ([], [], [])

    def run(step: Callable[..., torch.Tensor], found: list[float]) -> None:
        found.append(step(images, labels).item())

    steps: tuple[Callable[..., torch.Tensor], ...] = (eager, free, bounded)
    runs = [
        partial(run, step, found) for step, found in zip(steps, losses, strict=True)
    ]
    for _ in range(_WARM):
        for one in runs:
            one()
    by_eager, without, within = measure_together(
        runs, get_backend("cpu").device, _TURNS
    )
    whole, within_budget = plans
    return {
        "name": f"{name}, {_BATCH} images of {_IMAGE}×{_IMAGE}",
        "whole": whole.plan,
        "plan": within_budget.plan,
        "budget": budget,
        "whole_bytes": whole.peak_bytes,
        "peak_bytes": within_budget.peak_bytes,
        "without": without,
        "within": within,
        "same": losses[0] == losses[1] == losses[2],
        "eager": by_eager,
    }


def _model() -> tuple[str, nn.Module]:
    """Return torchvision's ResNet-18 if it is installed, else a small network."""
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
