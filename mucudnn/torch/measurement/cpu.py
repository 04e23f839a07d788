"""Times by the clock, bytes by PyTorch's profiler, copies by one thread."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mucudnn.torch.measurement.profiler_events import (
    allocations,
    most_in_use,
    spans,
)

__all__ = ["CpuMeter"]

_REPEATS = 3
_ENOUGH_S = 0.5
_MARK = "mucudnn:call:"
_COPIED = 16 << 20


class CpuMeter:
    """Measures calls on the CPU."""

    def time_ms(self, call: Callable[[], object]) -> float:
        """The median time of a call that has run before."""
        times: list[float] = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
            if sum(times) > _ENOUGH_S:
                break
        return 1e3 * statistics.median(times)

    def most_bytes(
        self, calls: Sequence[Callable[[], Callable[[], object]]]
    ) -> list[int]:
        """The most that each call has in use of what it allocates, results included."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            for number, prepared in enumerate(calls):
                call = prepared()
                with record_function(f"{_MARK}{number}"):
                    result = call()
                del call, result
        events = allocations(prof)
        found = [0] * len(calls)
        for name, start, stop in spans(prof, _MARK):
            mine = (row for row in events if start <= row[0] <= stop)
            found[int(name.removeprefix(_MARK))] = most_in_use(mine)
        return found

    def rates(self) -> tuple[float, float]:
        """Bytes a ms that one thread copies, in either direction."""
        source = torch.ones(_COPIED, dtype=torch.uint8)
        target = torch.zeros_like(source)
        rate = _COPIED / self.time_ms(lambda: target.copy_(source))
        return rate, rate
