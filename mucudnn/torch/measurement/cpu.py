"""Times by the clock, bytes by PyTorch's profiler, copies beside a computation.

Here a thread copies, on a core and through a memory that the computation wants as well.
So copies are timed while the heaviest operations of a step run, and what these take
longer meanwhile is theirs: at most the copy's own time, for which a computation could
as well have waited.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mucudnn.torch.execution.copies import host_bytes
from mucudnn.torch.measurement.links import Links
from mucudnn.torch.measurement.profiler_events import (
    allocations,
    most_in_use,
    spans,
)

__all__ = ["CpuMeter"]

_REPEATS = 3
_ENOUGH_S = 0.5
_MARK = "mucudnn:call:"
_COPIED = 4 << 20
_ROUNDS = 5
_ROUND_S = 0.01


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

    def links(self, prepared: Callable[[], Callable[[], object]]) -> Links:
        """Copies by one thread beside a call; out and back in turns."""
        call = prepared()
        source = torch.ones(_COPIED, dtype=torch.uint8)
        once = max(1e-6, self.time_ms(call) / 1e3)
        count = max(1, round(_ROUND_S / once))
        slower, out_s, back_s = [], [], []
        for _ in range(_ROUNDS):
            alone = _seconds(call, count)
            with _Copying(source) as copying:
                beside = _seconds(call, count)
                copied = sum(copying.out_s) + sum(copying.back_s)
            slower.append((beside - alone) / copied if copied else 0.0)
            out_s += copying.out_s
            back_s += copying.back_s
        out, back = statistics.median(out_s), statistics.median(back_s)
        share = min(1.0, max(0.0, statistics.median(slower)))
        return Links(_COPIED / 1e3 / out, _COPIED / 1e3 / back, share)


class _Copying:
    """A thread that copies there and back until the `with` ends, twice at least.

    Args:
        source: What it copies, again and again.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self._source = source
        self._ended = False
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self.out_s: list[float] = []
        self.back_s: list[float] = []

    def __enter__(self) -> "_Copying":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()

    def _copy(self) -> None:
        host = host_bytes(_COPIED)
        host.copy_(self._source)
        while not (self._ended and self.back_s):
            start = time.perf_counter()
            host.copy_(self._source)
            between = time.perf_counter()
            torch.empty_like(self._source).copy_(host)
            self.out_s.append(between - start)
            self.back_s.append(time.perf_counter() - between)


def _seconds(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start
