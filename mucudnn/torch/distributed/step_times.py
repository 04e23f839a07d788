"""Time forward and backward passes on this rank, at a few batch sizes.

All ranks measure at the same time, before the model is wrapped, so none waits for
another. The model's state is restored afterwards.
"""

import copy
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mucudnn.ir.fleet import StepPoint, StepTable
from mucudnn.passes.load_balancing import measured_table
from mucudnn.runtime.distributed.collectives import Stopwatch
from mucudnn.torch.execution.devices import forked_generators
from mucudnn.torch.optimizer_update import own_gradients

_REPEATS = 3


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of a model's parameters; the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def memory_of(device: torch.device) -> int | None:
    """Return the total memory of a device in bytes; None for the CPU."""
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
    """Return the table of step times of this rank.

    Sizes are from `least` to `most`; the table ends earlier if memory runs out.
    """
    device = device_of(model)
    name = "cpu" if device.type != "cuda" else torch.cuda.get_device_name(device)

    def measure(samples: int) -> StepPoint:
        torch.cuda.empty_cache()  # after a size that did not fit; no effect on the CPU
        inputs, *targets = _sized(example, samples)
        # The first step is a warm-up.
        _step(model, loss_fn, inputs, targets)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        times = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            _step(model, loss_fn, inputs, targets)
            times.append(1e3 * (time.perf_counter() - began))
        nbytes = 0
        if device.type == "cuda":
            nbytes = torch.cuda.max_memory_allocated(device)
        return StepPoint(samples, statistics.median(times), nbytes)

    with _restored(model):
        return measured_table(
            name, least, most, measure, unfitting=torch.OutOfMemoryError
        )


def _sized(example: Sequence[Any], samples: int) -> Sequence[Any]:
    """Return the example with this many samples, repeated or cut off."""

    def sized(leaf: Any) -> Any:
        if not (isinstance(leaf, torch.Tensor) and leaf.ndim):
            return leaf
        return leaf[torch.arange(samples, device=leaf.device) % leaf.shape[0]]

    found: Sequence[Any] = pytree.tree_map(sized, tuple(example))
    return found


def _step(
    model: torch.nn.Module, loss_fn: Callable[..., Any], inputs: Any, targets: Any
) -> None:
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    loss = loss_fn(model(*args), *targets)
    loss.backward()
    if loss.is_cuda:
        torch.cuda.synchronize(loss.device)


@contextmanager
def _restored(model: torch.nn.Module) -> Iterator[None]:
    """Restore gradients, buffers and the state of random generators."""
    buffers = [copy.deepcopy(b.detach()) for b in model.buffers()]
    try:
        with own_gradients(model.parameters()), forked_generators(model.parameters()):
            yield
    finally:
        # Buffers were changed in place, as by batch norm: restore them in place.
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(value)


_RECENT = 20
"""Steps of which the median is taken, so that a single slow one does not matter."""


class StepClock:
    """Times steps from the begin of the forward pass to the last gradients.

    On the CPU the time of collectives inside the passes is subtracted. On a CUDA device
    times are measured between events of its stream.

    Args:
        device: Device of the model.
        now: Clock in seconds, for the CPU.
    """

    def __init__(
        self, device: torch.device, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._cuda = device.type == "cuda"
        self._now = now
        self._began: float | torch.cuda.Event | None = None
        self._waited = Stopwatch(now)
        self._samples = 0.0
        self._steps: deque[tuple[float, float | tuple[torch.cuda.Event, ...]]] = deque(
            maxlen=_RECENT
        )

    def begin(self, samples: float) -> None:
        """Note the begin of a forward pass; all passes up to `end` are one step."""
        self._samples += samples
        if self._began is None:
            self._began = self._mark()
            self._waited.read_ms()

    def end(self) -> None:
        """Note that the last gradients of a step are computed."""
        if self._began is None:
            return
        began, end = self._began, self._mark()
        if isinstance(began, float) and isinstance(end, float):
            took: float | tuple[torch.cuda.Event, ...] = (
                end - began - 1e-3 * self._waited.read_ms()
            )
        else:
            took = (began, end)
        self._steps.append((self._samples, took))
        self._began, self._samples = None, 0.0

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context for waits for other ranks in the middle of a pass."""
        return self._waited.running()

    def factor(self, expected_ms: Callable[[int], float]) -> float:
        """Return the median ratio of measured to expected time; 1 without any step.

        The measured steps are forgotten.
        """
        steps = [(int(n), self._ms(took)) for n, took in self._steps if n >= 1]
        self._steps.clear()
        ratios = [ms / expected_ms(n) for n, ms in steps if expected_ms(n) > 0]
        return statistics.median(ratios) if ratios else 1.0

    def _mark(self) -> "float | torch.cuda.Event":
        if not self._cuda:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, took: "float | tuple[torch.cuda.Event, ...]") -> float:
        if isinstance(took, float):
            return 1e3 * took
        began, end = took
        end.synchronize()
        return float(began.elapsed_time(end))
