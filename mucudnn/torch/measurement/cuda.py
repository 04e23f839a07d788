"""Times by CUDA events, bytes by what PyTorch's allocator was asked for.

No GPU has run this yet: its logic is tested against a stand-in.

A time is that of several calls in a row, so that the processor is ahead of the device
and what is measured are kernels, not launches. Bytes are those that were asked for: a
budget is kept in these. What the allocator holds beyond, as it rounds sizes and keeps
segments, is its own affair and not counted; `expandable_segments` keeps it small.
Measuring resets the allocator's peaks.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mucudnn.torch.measurement.links import Links

__all__ = ["CudaMeter"]

_REPEATS = 3
_BURST = 8
_LONG_MS = 5.0
_COPIED = 64 << 20
_CURRENT = "requested_bytes.all.current"
_PEAK = "requested_bytes.all.peak"


class CudaMeter:
    """Measures calls on one GPU, in its current stream.

    Args:
        device: Which.
        cuda: PyTorch's module of that name.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda

    def time_ms(self, call: Callable[[], object]) -> float:
        """The median time of a call that has run before."""
        once = self._burst_ms(call, 1)
        if once > _LONG_MS:
            return once
        times = (self._burst_ms(call, _BURST) for _ in range(_REPEATS))
        return statistics.median(times)

    def most_bytes(
        self, calls: Sequence[Callable[[], Callable[[], object]]]
    ) -> list[int]:
        """The most that each call has in use of what it allocates, results included."""
        found = []
        for prepared in calls:
            call = prepared()
            self._cuda.synchronize(self._device)
            self._cuda.reset_peak_memory_stats(self._device)
            before = self._cuda.memory_stats(self._device).get(_CURRENT, 0)
            result = call()
            peak = self._cuda.memory_stats(self._device).get(_PEAK, 0)
            del call, result
            found.append(peak - before)
        return found

    def links(self, prepared: Callable[[], Callable[[], object]]) -> Links:
        """Between the device and pinned memory of the host: engines of their own copy.

        So it is not asked what copies cost beside a call.
        """
        del prepared
        here = torch.empty(_COPIED, dtype=torch.uint8, device=self._device)
        host = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
        here.copy_(host)
        out = self.time_ms(lambda: host.copy_(here, non_blocking=True))
        back = self.time_ms(lambda: here.copy_(host, non_blocking=True))
        return Links(_COPIED / out, _COPIED / back)

    def _burst_ms(self, call: Callable[[], object], count: int) -> float:
        """Time of one of so many calls in a row."""
        stream = self._cuda.current_stream(self._device)
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        for _ in range(count):
            call()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / count
