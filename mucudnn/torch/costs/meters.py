"""Meters of a call's time and scratch memory, and of the links to host memory.

There is one for CPUs and one for CUDA devices; `costs.measure` runs nodes with them.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import (
    ProfilerConfig,
    ProfilerState,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
)

from mucudnn.torch.execution.copies import (
    MANY,
    ThreadCopies,
    bytes_of,
    host_bytes,
    move,
)


@dataclass(frozen=True, slots=True)
class Links:
    """Rates of both links to host memory, as `Profile` has them."""

    out_bytes_per_ms: float
    in_bytes_per_ms: float
    copy_share: float = 0.0
    copy_overhead_ms: float = 0.0


Prepared = Callable[[], Callable[[], object]]
"""Makes the operands of a call, which are not counted, and returns the call."""


def meter_of(device: torch.device) -> "CpuMeter | CudaMeter":
    """Return the meter of a device."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


# Times by the clock, bytes by PyTorch's profiler, copies beside a computation.
#
# A time is the least of a few: whatever else the machine does only adds to it, and a
# plan compares times that were taken one after another. Where PyTorch computes in one
# thread, it is that thread's own time, which stops while another process has the core.
#
# On a CPU, a copying thread shares cores and memory with the computation. So copies are
# timed while the heaviest operations of a step run, and the slowdown of these counts as
# the copies': at most a copy's own time, for which a computation could as well have
# waited. The overhead of every copy, to hand it over and to wait for it, is measured
# with the copy engine of a step.


_CPU_REPEATS, _ENOUGH_S = 5, 0.5
_CPU_COPIED = 2 << 20
_PIECES = 8
"""Pieces of memory that are copied in turns: together larger than caches."""

_FEWEST, _ROUNDS, _ROUND_S = 4, 24, 0.003
_HANDED, _TURNS = 8, 16
"""Round trips that are timed together, and how often."""
_SHORT = (64, 64)
"""Shape of a matrix whose product runs beside copies of few bytes."""

_Clock = Callable[[], float]


class CpuMeter:
    """Measures calls on the CPU."""

    def time_ms(self, call: Callable[[], object]) -> float:
        """Return the least time of a call that has run before."""
        clock = _clock()
        times: list[float] = []
        for _ in range(_CPU_REPEATS):
            times.append(_seconds(call, 1, clock))
            if sum(times) > _ENOUGH_S:
                break
        return 1e3 * min(times)

    def most_bytes(self, calls: Sequence[Prepared]) -> list[int]:
        """Return the peak of what each call allocates, results included."""
        # In a thread of its own, where no profiler of the user's may be under way.
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(_peaks_of, calls).result()

    def links(self, prepared: Prepared) -> Links:
        """Measure copies by one thread beside a call, out and back in turns."""
        call = prepared()
        # All memory is touched once, as that of a step mostly is.
        source = torch.ones(_PIECES, _CPU_COPIED, dtype=torch.uint8, device="cpu")
        host = host_bytes(source.numel()).view(source.shape).copy_(source)
        memory = source.numpy(), host.numpy(), source.clone().numpy()
        once = max(1e-6, _seconds(call, 1, time.perf_counter))
        count = max(1, round(_ROUND_S / once))
        clock = _clock()
        alone, beside, copied, copies = [], [], [], []
        until = time.perf_counter() + _ENOUGH_S
        # Both are timed in turns, so that drift affects them alike.
        for turn in range(_ROUNDS):
            if turn >= _FEWEST and time.perf_counter() > until:
                break
            alone.append(_seconds(call, count, clock))
            with _copying(memory) as pairs:
                beside.append(_seconds(call, count, clock))
                copied.append(sum(map(sum, tuple(pairs))))
            copies += pairs
        longer, of = median(beside) - median(alone), median(copied)
        out, back = (min(some) for some in zip(*copies, strict=True))
        rates = (_CPU_COPIED / 1e3 / out, _CPU_COPIED / 1e3 / back)
        # Part of a copy's time by which it prolongs the call beside it.
        share = min(1.0, max(0.0, longer / of)) if of else 0.0
        beside_ms = share * sum(MANY / rate for rate in rates)
        overhead_ms = max(0.0, _handed_over_ms() - beside_ms) / 2
        return Links(*rates, share, overhead_ms)


@contextmanager
def _copying(memory: Sequence[Any]) -> Iterator[list[tuple[float, float]]]:
    """Copy there and back in a thread until the `with` ends, at least once.

    Args:
        memory: Pieces of source, host memory and target, which it copies in turns.

    Yields:
        Seconds of each copy out and each copy back so far.
    """
    clock, ended = _clock(), threading.Event()
    pairs: list[tuple[float, float]] = []

    def copy() -> None:
        while not (ended.is_set() and pairs):
            source, host, target = (held[len(pairs) % _PIECES] for held in memory)
            start = clock()
            move(source, host)
            between = clock()
            move(host, target)
            pairs.append((between - start, clock() - between))

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield pairs
    finally:
        ended.set()
        thread.join()


def _handed_over_ms() -> float:
    """Return the slowdown of a computation by one small copy out and one back.

    As in a step, the computation goes on once a copy is begun, and waits for it later.
    """
    copies = ThreadCopies(reuse=True)
    matrix = torch.ones(_SHORT, device="cpu")
    tensor = torch.ones(MANY, dtype=torch.uint8, device="cpu")

    def compute() -> None:
        for _ in range(_HANDED):
            matrix @ matrix

    def copied() -> None:
        offloaded = copies.offload(tensor, 0)
        compute()
        offloaded.wait()
        back = copies.prefetch(offloaded)
        compute()
        offloaded.wait()
        bytes_of(back)

    clock = _clock()
    alone, beside = [], []
    for _ in range(_TURNS):
        alone.append(_seconds(compute, 2 * _HANDED, clock))
        beside.append(_seconds(copied, _HANDED, clock))
    return 1e3 * (min(beside) - min(alone)) / _HANDED


def _clock() -> _Clock:
    """Return a clock of this thread's own time where PyTorch computes in no other."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _seconds(call: Callable[[], object], count: int, clock: _Clock) -> float:
    start = clock()
    for _ in range(count):
        call()
    return clock() - start


# Times by CUDA events, bytes by what PyTorch's allocator was asked for.
#
# Several calls in a row are timed, so that the processor is ahead of the device and
# kernels are measured, not launches. Bytes are those that were requested: a budget
# counts these. What the allocator holds beyond, as it rounds sizes and keeps segments,
# is not counted; `expandable_segments` keeps it small. Measuring resets the allocator's
# peaks.


_REPEATS, _BURST, _LONG_MS = 3, 8, 5.0
_COPIED = 64 << 20
_CURRENT = "requested_bytes.all.current"
_PEAK = "requested_bytes.all.peak"


class CudaMeter:
    """Measures calls on one GPU, in its current stream; `cuda` may be a stand-in."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda

    def time_ms(self, call: Callable[[], object]) -> float:
        """Return the median time of a call that has run before."""
        once = self._burst_ms(call, 1)
        if once > _LONG_MS:
            return once
        times = (self._burst_ms(call, _BURST) for _ in range(_REPEATS))
        return median(times)

    def most_bytes(self, calls: Sequence[Prepared]) -> list[int]:
        """Return the peak of what each call allocates, results included."""
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

    def links(self, prepared: Prepared) -> Links:
        """Measure copies between the device and pinned host memory."""
        del prepared  # copy engines do not slow down the computation
        here = torch.empty(_COPIED, dtype=torch.uint8, device=self._device)
        host = torch.empty(_COPIED, dtype=torch.uint8, device="cpu", pin_memory=True)
        here.copy_(host)
        out = self.time_ms(lambda: host.copy_(here, non_blocking=True))
        back = self.time_ms(lambda: here.copy_(host, non_blocking=True))
        return Links(_COPIED / out, _COPIED / back)

    def _burst_ms(self, call: Callable[[], object], count: int) -> float:
        """Return the time of one of so many calls in a row."""
        stream = self._cuda.current_stream(self._device)
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        for _ in range(count):
            call()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / count


# What a call has in use of PyTorch's CPU allocator, byte by byte.
#
# PyTorch's older profiler, of which `torch.autograd.profiler_legacy` is the public
# face, lists what one thread allocates and frees. Unlike `torch.profiler` it starts no
# Kineto, which writes lines to stderr when it starts and stops. Calls have a thread of
# their own, so that a profiler of the user's may be under way in theirs.


_MEMORY = "memory_alloc"


def _peaks_of(calls: Sequence[Prepared]) -> list[int]:
    """Return the peak of what each call allocates on the CPU."""
    enabled = gc.isenabled()
    gc.disable()  # cycles may hold tensors from elsewhere
    try:
        with torch.no_grad():
            return [_peak_of(prepared()) for prepared in calls]
    finally:
        if enabled:
            gc.enable()


def _peak_of(call: Callable[[], object]) -> int:
    """Return the peak of one call, during which nothing older is freed."""
    config = ProfilerConfig(
        ProfilerState.CPU,
        False,  # no shapes
        True,  # memory
        False,  # no stacks
        False,  # no floating-point operations
        False,  # no modules
        _ExperimentalConfig(),
    )
    _enable_profiler_legacy(config)
    try:
        result = call()
    finally:
        threads = _disable_profiler_legacy()
    del result
    now = most = 0
    for event in (event for events in threads for event in events):
        if event.kind() == _MEMORY:
            now += event.cpu_memory_usage()
            most = max(most, now)
    return most
