"""Training steps of one network: ours, and PyTorch's, of the same batch on the host.

A step is what a loop of training repeats: a batch is handed over, from page-locked
memory for PyTorch, forward, backward, momentum. Nobody reads the loss. In half
precision PyTorch has autocast and a `GradScaler`, ours its dynamic loss scale.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mucudnn.models import get_model
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["Case", "TorchStep", "ours", "sampled"]

_STEPS = 4
"""Timed together, so that the host may run ahead as it does in training."""

_SEED = 0


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        network: A name in `bench.step_torch.NETWORKS`.
        batch: Images in a step.
        image: Height and width of one.
        precision: `float32`, with TF32 where the hardware has it, or a half type.
        layout: `NCHW` or `NHWC`.
    """

    network: str
    batch: int
    image: int
    precision: str
    layout: str

    @property
    def narrow(self) -> str | None:
        """The half type, if there is one."""
        return None if self.precision == "float32" else self.precision

    @functools.cached_property
    def graph(self) -> Any:
        """The network's."""
        return get_model(self.network)(self.batch, image=self.image)

    def data(self) -> tuple[Any, Any]:
        """Images and labels, on the host."""
        import numpy as np

        rng = np.random.default_rng(_SEED)
        tensors = self.graph.tensors
        images = rng.standard_normal(tensors["image"].shape, np.float32)
        return images, rng.integers(0, 2, tensors["label"].shape)


def ours(case: Case, tuner: Tuner, *, replay: bool, plans: Any = None) -> Trainer:
    """A trainer with momentum; its launches are replayed as graphs if asked to."""
    return Trainer(
        case.graph,
        tuner=tuner,
        optimizer="momentum",
        learning_rate=1e-3,
        precision=case.narrow,
        loss_scale="dynamic" if case.narrow == "float16" else None,
        layout=case.layout,
        replay=replay,
        plans=plans,
    )


class TorchStep:
    """PyTorch's step, eager or compiled by its default compiler.

    Args:
        case: What.
        device: Where.
        compiled: Whether the network is.
    """

    def __init__(self, case: Case, device: str, *, compiled: bool) -> None:
        import torch

        from bench.step_torch import NETWORKS

        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = True
        self._torch, self._device = torch, device
        last = case.layout == "NHWC"
        form = torch.channels_last if last else torch.contiguous_format
        torch.manual_seed(_SEED)
        network = NETWORKS[case.network]().train()
        network = network.to(device, memory_format=form)
        self._optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
        self._network = torch.compile(network) if compiled else network
        self._dtype = None if case.narrow is None else getattr(torch, case.narrow)
        scaled = case.narrow == "float16"
        self._scaler = torch.amp.GradScaler(device, enabled=scaled)
        images, labels = (torch.from_numpy(a) for a in case.data())
        self._batch = images.to(memory_format=form), labels
        if device == "cuda":
            self._batch = tuple(one.pin_memory() for one in self._batch)

    def __call__(self) -> Any:
        """One step; its loss, on the device."""
        torch = self._torch
        x, y = (one.to(self._device, non_blocking=True) for one in self._batch)
        self._optimizer.zero_grad()
        half = self._dtype is not None
        with torch.autocast(self._device, dtype=self._dtype, enabled=half):
            loss = torch.nn.functional.cross_entropy(self._network(x), y)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return loss.detach()


def sampled(
    step: Callable[[], object], wait: Callable[[], object]
) -> Callable[[], float]:
    """Times some steps together: ms of one."""

    def sample() -> float:
        wait()
        begun = time.perf_counter()
        for _ in range(_STEPS):
            step()
        wait()
        return 1e3 * (time.perf_counter() - begun) / _STEPS

    return sample
