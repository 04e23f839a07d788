"""`compare_step`: PyTorch's own ways to save memory beside planned steps, all run here.

Each way trains a copy of the model by a few whole steps: forward, backward and update.
Peaks are read from the allocator. Our step within the same memory is set beside each;
eager mode, the way and ours run in turns, and times are over eager mode's.
"""

import copy
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch._functorch import config
from torch._inductor import config as inductor_config
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from mucudnn.errors import MucudnnError, UnsupportedError
from mucudnn.torch.capture.step_tensors import PLAIN, Batch, check_parts
from mucudnn.torch.costs.meters import meter_of
from mucudnn.torch.eager_step import run_eager_step
from mucudnn.torch.execution.copies import host_bytes
from mucudnn.torch.step import train_step

_ROUNDS = 3
_SHARE = 0.5
"""The `activation_memory_budget` that is tried."""

EAGER = "eager mode"


@dataclass(frozen=True, slots=True)
class ComparedWay:
    """One way to run a training step, beside our step in the same memory.

    Attributes:
        way: Its name.
        peak_bytes: Peak memory of a step without the batch; None if it failed.
        slowdown: Time of a step over eager mode's.
        ours_bytes: Planned peak of our step within `peak_bytes`; None if it does not
            fit.
        ours_slowdown: Time of our step over eager mode's.
        error: Why it failed, or why ours does not fit; empty otherwise.
    """

    way: str
    peak_bytes: int | None = None
    slowdown: float | None = None
    ours_bytes: int | None = None
    ours_slowdown: float | None = None
    error: str = ""


def compare_step(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    example: Sequence[Any] | Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    *,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> tuple[ComparedWay, ...]:
    """Run a training step in PyTorch's ways to save memory, and ours beside each.

    The model, the loss and the optimizer are copied and stay as they are.

    Raises:
        UnsupportedError: The model has no data, or cannot be copied.
    """
    check_parts(model, loss_fn, optimizer)
    named = example if isinstance(example, Mapping) else {}
    batch = Batch.of(() if named else tuple(example), named)
    if any(t.is_meta for t in (*model.parameters(), *batch.tensors)):
        raise UnsupportedError(
            "the comparison runs the step, but the model or its batch has no data "
            "(device 'meta'); create them on the CPU"
        )
    found = []
    total = 2 * len(_WAYS)
    args, kwargs = batch.arguments(batch.tensors)
    given = model, loss_fn, optimizer
    eager = partial(_eager(_copied(given)), batch)
    with TemporaryDirectory() as cache:  # of measurements, for all of our steps
        for i, (name, prepare) in enumerate(_WAYS.items()):
            progress(name, 2 * i, total)
            parts = _copied(given)
            try:
                step = partial(prepare(parts), batch)
                peak = _peak_bytes(parts, step)
                progress(f"mucudnn in the memory of {name}", 2 * i + 1, total)
                budget = math.inf if name == EAGER else peak
                ours = train_step(*_copied(given), budget=budget, cache=cache)
                try:
                    plan = ours.prepare(*args, **kwargs)
                except MucudnnError as e:
                    _, slowdown = _slowdowns(eager, step)
                    found.append(ComparedWay(name, peak, slowdown, error=_line(e)))
                    continue
                _, slowdown, mine = _slowdowns(
                    eager, step, partial(ours, *args, **kwargs)
                )
                found.append(ComparedWay(name, peak, slowdown, plan.peak_bytes, mine))
            except Exception as e:  # a model may refuse any of them
                found.append(ComparedWay(name, error=_line(e)))
            finally:
                torch._dynamo.reset()
    return tuple(found)


Step = Callable[[Batch], object]
Parts = tuple[nn.Module, Callable[..., Any], torch.optim.Optimizer]


def _copied(parts: Parts) -> Parts:
    try:
        return copy.deepcopy(parts)
    except (TypeError, RuntimeError) as e:
        raise UnsupportedError(
            f"{type(parts[0]).__name__} cannot be copied, which the comparison "
            f"requires: {e}"
        ) from e


def _peak_bytes(parts: Parts, step: Callable[[], object]) -> int:
    """Return the peak memory of a step, without its batch."""
    model, loss_fn, optimizer = parts
    step()  # compiles, and makes the optimizer's state
    modules = [m for m in (model, loss_fn) if isinstance(m, nn.Module)]
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (
            *(t for m in modules for t in (*m.parameters(), *m.buffers())),
            *(value for value in states if isinstance(value, torch.Tensor)),
        )
    }
    (peak,) = meter_of(next(model.parameters()).device).most_bytes([lambda: step])
    return int(peak + sum(held.values()))


def _slowdowns(*steps: Callable[[], object]) -> list[float]:
    """Return median times over the first's; all run in turns, once before."""
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(_ROUNDS + 1):
        for step, mine in zip(steps, times, strict=True):
            start = perf_counter()
            step()
            if turn:
                mine.append(perf_counter() - start)
    first, *others = map(statistics.median, times)
    return [1.0, *(other / first for other in others)]


def _line(error: Exception) -> str:
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text}"


# PyTorch's ways: each returns a function that trains on one batch.


def _eager(parts: Parts) -> Step:
    return lambda batch: run_eager_step(*parts, batch, PLAIN)


def _checkpointed(parts: Parts) -> Step:
    """Checkpoint each member of the list of modules that holds most of the model."""
    blocks = max(
        (m for m in parts[0].modules() if isinstance(m, nn.Sequential | nn.ModuleList)),
        key=lambda m: (len(m) > 1, sum(p.numel() for p in m.parameters())),
        default=None,
    )
    if blocks is None or len(blocks) < 2:
        raise UnsupportedError("the model has no nn.Sequential or nn.ModuleList")
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return _eager(parts)


def _saved_on_host(parts: Parts) -> Step:
    """Offload all saved tensors; `save_on_cpu` would use the allocator's own memory."""
    free: dict[int, list[torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nbytes = tensor.numel() * tensor.itemsize
        place = free.setdefault(nbytes, [])
        flat = place.pop() if place else host_bytes(nbytes)
        host = flat.view(tensor.dtype).view(tensor.shape)
        return flat, host.copy_(tensor)

    def unpack(packed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        flat, host = packed
        free[flat.numel()].append(flat)
        return host.clone()

    def step(batch: Batch) -> object:
        with saved_tensors_hooks(pack, unpack):
            return run_eager_step(*parts, batch, PLAIN)

    return step


def _compiled(share: float, parts: Parts) -> Step:
    """Compile by Inductor under PyTorch's own budget of saved activations."""
    model, loss_fn, optimizer = parts
    compiled = torch.compile(model, dynamic=False)

    def step(batch: Batch) -> object:
        with (
            config.patch(activation_memory_budget=share, enable_autograd_cache=False),
            inductor_config.patch(fx_graph_cache=False),
        ):
            return run_eager_step(compiled, loss_fn, optimizer, batch, PLAIN)

    return step


_WAYS: Mapping[str, Callable[..., Step]] = {
    EAGER: _eager,
    "checkpointing of every block": _checkpointed,
    "save_on_cpu": _saved_on_host,
    f"torch.compile with activation_memory_budget={_SHARE:g}": partial(
        _compiled, _SHARE
    ),
}
