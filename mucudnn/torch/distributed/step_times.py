"""What a step takes on this rank: forward and backward, at a few sizes.

Every rank measures itself, all at the same time, before the model is wrapped: nobody
waits for anybody. The model is left as it was found.
"""

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mucudnn.ir.fleet import StepPoint, StepTable
from mucudnn.passes.fleet.sizes import measured_table

__all__ = ["device_of", "measure_steps", "memory_of"]

_REPEATS = 3


def device_of(model: torch.nn.Module) -> torch.device:
    """Where a model's parameters are; the CPU where it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def memory_of(device: torch.device) -> int | None:
    """Bytes of a device that a step may use; None on the CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.mem_get_info(device)[1])


def measure_steps(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    example: Sequence[Any],
    *,
    least: int,
    most: int,
) -> StepTable:
    """The table of steps of this rank, up to a size, or the largest that fits.

    Args:
        model: What is trained, before it is wrapped.
        loss_fn: Of its result and the rest of a batch.
        example: A batch of any size: the model's input, then the loss's arguments.
        least: The smallest size.
        most: The largest.
    """
    device = device_of(model)
    name = "cpu" if device.type != "cuda" else torch.cuda.get_device_name(device)

    def measure(samples: int) -> StepPoint:
        torch.cuda.empty_cache()  # of a size that did not fit; nothing on the CPU
        inputs, *targets = _sized(example, samples)
        _step(model, loss_fn, inputs, targets)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        times = [_timed(model, loss_fn, inputs, targets) for _ in range(_REPEATS)]
        nbytes = 0
        if device.type == "cuda":
            nbytes = torch.cuda.max_memory_allocated(device)
        return StepPoint(samples, statistics.median(times), nbytes)

    with _left_alone(model):
        return measured_table(
            name, least, most, measure, unfitting=torch.OutOfMemoryError
        )


def _sized(example: Sequence[Any], samples: int) -> Sequence[Any]:
    """The example with as many samples, repeated or cut off."""

    def sized(leaf: Any) -> Any:
        if not (isinstance(leaf, torch.Tensor) and leaf.ndim):
            return leaf
        return leaf[torch.arange(samples, device=leaf.device) % leaf.shape[0]]

    found: Sequence[Any] = pytree.tree_map(sized, tuple(example))
    return found


def _timed(
    model: torch.nn.Module, loss_fn: Callable[..., Any], inputs: Any, targets: Any
) -> float:
    began = time.perf_counter()
    _step(model, loss_fn, inputs, targets)
    return 1e3 * (time.perf_counter() - began)


def _step(
    model: torch.nn.Module, loss_fn: Callable[..., Any], inputs: Any, targets: Any
) -> None:
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    loss = loss_fn(model(*args), *targets)
    loss.backward()
    if loss.is_cuda:
        torch.cuda.synchronize(loss.device)


@contextmanager
def _left_alone(model: torch.nn.Module) -> Iterator[None]:
    """Gradients, buffers and random numbers as they were."""
    gradients = [p.grad for p in model.parameters()]
    buffers = [copy.deepcopy(b.detach()) for b in model.buffers()]
    devices = {p.device.index for p in model.parameters() if p.is_cuda}
    try:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(value)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
