"""Times by the clock, bytes by PyTorch's profiler, copies beside a computation.

A time is the least of a few: whatever else the machine does only adds to it, and a plan
weighs times that were taken one after another. Where PyTorch computes in one thread, it
is that thread's own time, which does not go on while another process has the core.

Here a thread copies, on a core and through a memory that the computation wants as well.
So copies are timed while the heaviest operations of a step run, and what these take
longer meanwhile is theirs: at most the copy's own time, for which a computation could
as well have waited. What every copy takes of the computation, to be handed over and to
be waited for, is measured with the lanes that copy in a step.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from mucudnn.torch.execution.copies import (
    MANY,
    ThreadCopies,
    bytes_of,
    host_bytes,
    move,
)
from mucudnn.torch.measurement.allocator_events import most_bytes
from mucudnn.torch.measurement.links import Links

__all__ = ["CpuMeter"]

_REPEATS = 5
_ENOUGH_S = 0.5
_COPIED = 2 << 20
_PIECES = 8
"""Of memory that is copied in turns: together more than caches have."""

_FEWEST, _ROUNDS = 4, 24
_ROUND_S = 0.003

_HANDED, _TURNS = 8, 16
"""Copies there and back that are timed together, and how often."""

_SHORT = (64, 64)
"""Of a matrix whose product is the computation beside copies of few bytes."""

_Clock = Callable[[], float]


class CpuMeter:
    """Measures calls on the CPU."""

    def time_ms(self, call: Callable[[], object]) -> float:
        """The least time of a call that has run before."""
        clock = _clock()
        times: list[float] = []
        for _ in range(_REPEATS):
            times.append(_seconds(call, 1, clock))
            if sum(times) > _ENOUGH_S:
                break
        return 1e3 * min(times)

    def most_bytes(
        self, calls: Sequence[Callable[[], Callable[[], object]]]
    ) -> list[int]:
        """The most that each call has in use of what it allocates, results included."""
        return most_bytes(calls)

    def links(self, prepared: Callable[[], Callable[[], object]]) -> Links:
        """Copies by one thread beside a call; out and back in turns."""
        call = prepared()
        memory = _Memory.touched()
        once = max(1e-6, _seconds(call, 1, time.perf_counter))
        count = max(1, round(_ROUND_S / once))
        clock = _clock()
        alone, beside, copied, copies = [], [], [], []
        until = time.perf_counter() + _ENOUGH_S
        for turn in range(_ROUNDS):
            if turn >= _FEWEST and time.perf_counter() > until:
                break
            alone.append(_seconds(call, count, clock))
            with _Copying(memory) as copying:
                beside.append(_seconds(call, count, clock))
                copied.append(copying.copied_s)
            copies += copying.pairs
        longer, of = median(beside) - median(alone), median(copied)
        out, back = (min(some) for some in zip(*copies, strict=True))
        rates = (_COPIED / 1e3 / out, _COPIED / 1e3 / back)
        share = min(1.0, max(0.0, longer / of)) if of else 0.0
        beside_ms = share * sum(MANY / rate for rate in rates)
        overhead_ms = max(0.0, _handed_over_ms() - beside_ms) / 2
        return Links(*rates, share, overhead_ms)


@dataclass(frozen=True)
class _Memory:
    """Pieces to copy, on the device and on the host, touched as a step's mostly are."""

    source: torch.Tensor
    host: torch.Tensor
    target: torch.Tensor

    @classmethod
    def touched(cls) -> "_Memory":
        """All of it, written to once."""
        source = torch.ones(_PIECES, _COPIED, dtype=torch.uint8)
        host = host_bytes(source.numel()).view(source.shape)
        return cls(source, host.copy_(source), source.clone())


class _Copying:
    """A thread that copies there and back until the `with` ends, once at least.

    Args:
        memory: What it copies, again and again.
    """

    def __init__(self, memory: _Memory) -> None:
        self._memory = memory
        self._clock = _clock()
        self._ended = False
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self.pairs: list[tuple[float, float]] = []

    def __enter__(self) -> "_Copying":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()

    @property
    def copied_s(self) -> float:
        """What its copies so far took."""
        return sum(map(sum, tuple(self.pairs)))

    def _copy(self) -> None:
        memory, clock = self._memory, self._clock
        while not (self._ended and self.pairs):
            piece = len(self.pairs) % _PIECES
            source, host = memory.source[piece], memory.host[piece]
            target = memory.target[piece]
            start = clock()
            move(source, host, _COPIED)
            between = clock()
            move(host, target, _COPIED)
            self.pairs.append((between - start, clock() - between))


def _handed_over_ms() -> float:
    """What a computation takes longer for one small copy there and one back.

    As in a step: the computation goes on once a copy is begun, and waits for it after.
    """
    lanes = ThreadCopies(reuse=True)
    matrix, tensor = torch.ones(_SHORT), torch.ones(MANY, dtype=torch.uint8)

    def compute() -> None:
        for _ in range(_HANDED):
            matrix @ matrix

    def copied() -> None:
        leaving = lanes.out(tensor, 0)
        compute()
        leaving.wait()
        back = lanes.back(leaving)
        compute()
        leaving.wait()
        bytes_of(back)

    clock = _clock()
    alone, beside = [], []
    for _ in range(_TURNS):
        alone.append(_seconds(compute, 2 * _HANDED, clock))
        beside.append(_seconds(copied, _HANDED, clock))
    return 1e3 * (min(beside) - min(alone)) / _HANDED


def _clock() -> _Clock:
    """This thread's own time, where PyTorch computes in no other."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _seconds(call: Callable[[], object], count: int, clock: _Clock) -> float:
    start = clock()
    for _ in range(count):
        call()
    return clock() - start
