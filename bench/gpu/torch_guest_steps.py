"""A PyTorch network trained eagerly and by a plan: numbers, bytes and times."""

import copy
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mucudnn.errors import PlanningError

__all__ = ["Guest", "Sizes"]

_STEPS = 3
_ROUNDS = 10
_LEARNING_RATE = 0.05

Step = Callable[[], Any]
"""One training step; its loss."""


@dataclass(frozen=True)
class Sizes:
    """How large the networks and their batches are.

    Attributes:
        gpt: Layers, width, heads, length and vocabulary of a decoder.
        sequences: Its batch.
        images: Batch of ResNet-18.
        pixels: Height and width of an image.
    """

    gpt: tuple[int, int, int, int, int] = (4, 256, 4, 256, 4096)
    sequences: int = 16
    images: int = 32
    pixels: int = 224

    @classmethod
    def of(cls, batch: int | None) -> "Sizes":
        """Those for a GPU, or with another batch."""
        return cls() if batch is None else cls(sequences=batch, images=batch)

    @classmethod
    def small(cls, batch: int | None) -> "Sizes":
        """For rehearsals."""
        batch = 2 if batch is None else batch
        return cls((1, 32, 2, 16, 64), batch, batch, 32)


class Guest:
    """One network, trained in two ways that begin alike.

    Args:
        network: `gpt` or `resnet18`.
        way: `train_step` or `backend`.
        sizes: Of the network and its batch.
        device: Where it is.
    """

    def __init__(self, network: str, way: str, sizes: Sizes, device: str) -> None:
        import torch

        torch.manual_seed(0)
        self._device = device
        model, self._loss_fn, batch = _case(network, sizes)
        self._batch = tuple(tensor.to(device) for tensor in batch)
        self._start = model.to(device)
        self._planned = {"train_step": _TrainStep, "backend": _Backend}[way]

    def measured(self, limited: bool, deadline: float) -> dict[str, Any]:
        """Its row; times end at the deadline, after one round at the earliest."""
        model, other, third = (copy.deepcopy(self._start) for _ in range(3))
        eager, again = self._eager(model), self._eager(other)
        ours = self._planned(third, self._loss_fn, self._batch)
        wanted, twice = self._states(model, eager), self._states(other, again)
        ours.prepare()
        found = self._states(third, ours)
        if limited:
            ours.limit()
            wanted, twice = self._states(model, eager), self._states(other, again)
            found = self._states(third, ours)
        row = {
            "difference": _difference(found, wanted),
            "eager_difference": _difference(twice, wanted),
            "eager_repeats": _difference(twice, wanted) == 0,
            "budget_bytes": ours.budget,
            "planned_bytes": ours.plan.peak_bytes - ours.plan.resident_bytes,
            "peak_bytes": self._peak(ours),
            "eager_bytes": self._peak(eager),
            "resident_bytes": ours.plan.resident_bytes,
        }
        ms = self._times({"ms": ours, "eager_ms": eager}, deadline)
        return {**row, **ms, "predicted_slowdown": ours.plan.slowdown}

    def _eager(self, model: Any) -> Step:
        optimizer = _optimizer(model)

        def step() -> Any:
            x, *targets = self._batch
            loss = self._loss_fn(model(x), *targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def _states(self, model: Any, step: Step) -> list[Any]:
        """Losses of some steps, and what the model holds after them."""
        import torch

        torch.manual_seed(1)
        losses = [step().clone() for _ in range(_STEPS)]
        return [*losses, *(value.clone() for value in model.state_dict().values())]

    def _peak(self, step: Step) -> int:
        """Bytes of the allocator's that a step takes beyond what is there."""
        import torch

        if self._device == "cpu":
            from bench.torch.peak import real_peak

            return real_peak(step)
        cuda = torch.cuda
        gc.collect()
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        before: int = cuda.memory_allocated()
        step()
        cuda.synchronize()
        most: int = cuda.max_memory_allocated()
        return most - before

    def _times(self, steps: dict[str, Step], deadline: float) -> dict[str, float]:
        """Medians in ms of steps that take turns."""
        import torch

        wait = torch.cuda.synchronize if self._device == "cuda" else _nothing
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(_ROUNDS):
            for name, step in steps.items():
                wait()
                begun = time.perf_counter()
                step()
                wait()
                taken[name].append(1e3 * (time.perf_counter() - begun))
            if time.monotonic() >= deadline:
                break
        return {name: statistics.median(ms) for name, ms in taken.items()}


class _Planned:
    """A planned step that can be given a limit, halfway to the least possible.

    Attributes:
        budget: In bytes; None if there is none.
    """

    def __init__(self, model: Any, loss_fn: Any, batch: Any) -> None:
        self._model, self._loss_fn, self._batch = model, loss_fn, batch
        self._optimizer = _optimizer(model)
        self.budget: int | None = None
        self._make(None)

    def limit(self) -> None:
        """Plan anew, in half of what a plan can save."""
        full = self.plan.peak_bytes
        try:
            self._make(0)
            self._refused()
        except PlanningError as e:
            if e.least_bytes is None:
                raise
            self.budget = (full + e.least_bytes) // 2
        self._make(self.budget)
        self.prepare()

    @property
    def plan(self) -> Any:
        """Of the last step."""
        raise NotImplementedError

    def __call__(self) -> Any:
        """One step; its loss."""
        raise NotImplementedError

    def _make(self, budget: int | None) -> None:
        raise NotImplementedError

    def prepare(self) -> None:
        """Plan, where that can be apart from a step: it may draw random numbers."""

    def _refused(self) -> None:
        """Ask for a plan that cannot be."""
        raise NotImplementedError


class _TrainStep(_Planned):
    """By `train_step`."""

    @property
    def plan(self) -> Any:
        return self._step.plan

    def __call__(self) -> Any:
        return self._step(*self._batch)

    def _make(self, budget: int | None) -> None:
        import mucudnn.torch as mt

        self._step = mt.train_step(
            self._model, self._loss_fn, self._optimizer, budget=budget, cache=None
        )

    def prepare(self) -> None:
        self._step.prepare(*self._batch)

    def _refused(self) -> None:
        self.prepare()


class _Backend(_Planned):
    """By `torch.compile` with our backend; the optimizer's step is eager."""

    @property
    def plan(self) -> Any:
        return self._backend.plans[-1]

    def __call__(self) -> Any:
        loss = self._call(*self._batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def _make(self, budget: int | None) -> None:
        import torch

        import mucudnn.torch as mt

        def loss_of(x: Any, *targets: Any) -> Any:
            return self._loss_fn(self._model(x), *targets)

        torch._dynamo.reset()
        self._backend = mt.backend(budget=budget, cache=None)
        self._call = torch.compile(loss_of, backend=self._backend, fullgraph=True)

    def _refused(self) -> None:
        self._call(*self._batch)


def _case(network: str, sizes: Sizes) -> tuple[Any, Any, tuple[Any, ...]]:
    """A model in training mode, its loss and a batch, on the host."""
    import torch

    from bench.step_torch import NETWORKS
    from bench.torch.zoo import GPTConfig, gpt

    if network == "gpt":
        layers, width, heads, length, vocabulary = sizes.gpt
        config = GPTConfig(layers, width, heads, length, vocabulary)
        case = gpt(sizes.sequences, config)
        return case.model, case.loss_fn, case.batch
    x = torch.randn(sizes.images, 3, sizes.pixels, sizes.pixels)
    y = torch.randint(1000, (sizes.images,))
    loss_fn = torch.nn.functional.cross_entropy
    return NETWORKS[network]().train(), loss_fn, (x, y)


def _optimizer(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), _LEARNING_RATE, momentum=0.9)


def _difference(found: list[Any], wanted: list[Any]) -> float:
    """The largest, of any tensor's largest number; infinite where one is not finite."""
    worst = 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        off = (ours.double() - theirs.double()).abs().max().item()
        if off != off:
            return float("inf")
        worst = max(worst, off / max(1e-30, theirs.double().abs().max().item()))
    return worst


def _nothing() -> None:
    pass
