"""Plans of PyTorch models by three entry points, every kernel at one millisecond."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn.errors import PlanningError
from tests.torch_models import ResNet18, UNet
from tests.torch_programs import free_costs
from tests.torch_steps import build

NAMES = ("mlp", "cnn", "gpt", "lstm", "resnet", "unet")


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(16, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(state[0])


def model_of(name: str) -> Any:
    """Return a model, its loss and a batch, always the same."""
    if name in ("mlp", "cnn", "gpt"):
        return build(name)
    torch.manual_seed(0)
    if name == "lstm":
        batch = torch.randn(8, 12, 16), torch.randint(0, 10, (8,))
        return LastState(), functional.cross_entropy, batch
    if name == "resnet":
        batch = torch.randn(2, 3, 64, 64), torch.randint(0, 10, (2,))
        return ResNet18(10), functional.cross_entropy, batch
    model = nn.Sequential(UNet(1, 8, 2), nn.Conv2d(8, 2, 1))
    return (
        model,
        functional.mse_loss,
        (torch.randn(2, 1, 32, 32), torch.randn(2, 2, 32, 32)),
    )


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def by_train_step(name: str, budget: int | None) -> Any:
    model, loss_fn, batch = model_of(name)
    step = mt.train_step(model, loss_fn, optimizer_of(model), budget=budget, cache=None)
    step(*batch)
    return step.plan


def by_backend(name: str, budget: int | None) -> Any:
    model, loss_fn, (x, *targets) = model_of(name)
    backend = mt.backend(budget=budget, cache=None)
    loss_fn(
        torch.compile(model, backend=backend, dynamic=False)(x), *targets
    ).backward()
    (plan,) = backend.plans
    return plan


def by_memory(name: str, budget: int | None) -> Any:
    model, loss_fn, batch = model_of(name)
    study = mt.memory(model, loss_fn, batch, optimizer_of(model), device="cpu")
    return study.plan(budget)


FACES = (by_train_step, by_backend, by_memory)


def steps(
    digest: Callable[[Any], str], instructions_of: Callable[[Any], Any]
) -> Iterator[tuple[str, str]]:
    """Yield a digest of the plan of each model, by each face, at two budgets."""
    torch.set_num_threads(1)
    with free_costs(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in NAMES:
            for face in FACES:
                torch._dynamo.reset()
                torch.manual_seed(0)
                whole = face(name, None)
                yield f"{name}/{face.__name__}", digest(told(whole, instructions_of))
                budget = int(0.85 * whole.peak_bytes)
                torch._dynamo.reset()
                torch.manual_seed(0)
                try:
                    found = told(face(name, budget), instructions_of)
                except Exception as e:
                    cause = getattr(e, "inner_exception", e)
                    if not isinstance(cause, PlanningError):
                        raise
                    found = str(cause)
                yield f"{name}/{face.__name__}/{budget}", digest(found)


def told(plan: Any, instructions_of: Callable[[Any], Any]) -> Any:
    with contextlib.suppress(AttributeError):
        return [plan.peak_bytes, instructions_of(plan.plan.schedule), plan.source]
    return [plan.peak_bytes, instructions_of(plan.plan.schedule)]
