"""What this rank's steps take, without what it waits for others."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from mucudnn.runtime.distributed.waiting import Stopwatch

__all__ = ["StepClock"]

_KEPT = 20
"""Steps that are looked at: as many as to see through a single slow one."""


class StepClock:
    """Times from the start of the forward pass until the last gradients are there.

    On the CPU what collectives inside the passes take is left out. On a CUDA device the
    times are between events of its stream.

    Args:
        device: Where the model is.
        now: A clock in seconds, for the CPU.
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
            maxlen=_KEPT
        )

    def begin(self, samples: float) -> None:
        """A forward pass begins; those up to the next `end` are one step."""
        self._samples += samples
        if self._began is None:
            self._began = self._mark()
            self._waited.read_ms()

    def end(self) -> None:
        """The last gradients of a step are there."""
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
        """Around what waits for others in the middle of a pass."""
        return self._waited.running()

    def factor(self, expected_ms: Callable[[int], float]) -> float:
        """How many times as long as expected steps took, in the middle; 1 without any.

        What was seen is forgotten then.
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
