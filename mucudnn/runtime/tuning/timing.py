"""Time kernels: warm-up, repeated samples, the median and its standard error."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mucudnn.backends import Device

LAUNCH_OVERHEAD_MS = 0.005
"""Host time of one more micro-batch, beyond the kernel's own time."""

_MEDIAN_ERROR = 1.2533  # standard error of a median, in units of that of a mean
_MAD_TO_SIGMA = 1.4826  # median absolute deviation to standard deviation


@dataclass(frozen=True, slots=True)
class Timing:
    """Median of samples in ms, its standard error, and the number of samples.

    Zero samples mean that time allowed only the warm-up, whose time this is.
    """

    time_ms: float
    noise_ms: float
    samples: int

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> "Timing":
        """Summarize at least one sample."""
        median = statistics.median(samples_ms)
        spread = statistics.median(abs(s - median) for s in samples_ms)
        error = _MEDIAN_ERROR * _MAD_TO_SIGMA * spread / math.sqrt(len(samples_ms))
        return cls(median, error, len(samples_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingRule:
    """Decides when a kernel has been timed enough.

    Attributes:
        min_samples: Minimum of timed runs after the warm-up, unless time is up.
        max_samples: Maximum of timed runs.
        margin: Stop once the standard error is below this share of the median.
        budget_ms: Stop once the samples add up to this; a kernel whose warm-up exceeds
            it is timed once.
        hopeless: A kernel whose warm-up takes this many times the best time known is
            not run again; the warm-up is its time.
        behind: A kernel that takes this many times the best time known, warmed up as
            well, is timed once.
        clear: Ratio of times that one round over the budget proves, where several are
            timed together.
    """

    min_samples: int = 3
    max_samples: int = 25
    margin: float = 0.01
    budget_ms: float = 120.0
    hopeless: float = 4.0
    behind: float = 2.0
    clear: float = 1.5

    def __post_init__(self) -> None:
        if not 1 <= self.min_samples <= self.max_samples:
            raise ValueError(
                f"min_samples is {self.min_samples}, max_samples {self.max_samples}; "
                "at least 1, and no more than max_samples, is needed"
            )

    def enough(self, samples_ms: Sequence[float]) -> bool:
        """Return whether these samples suffice."""
        if len(samples_ms) >= self.max_samples:
            return True
        if not samples_ms:
            return False
        if sum(samples_ms) >= self.budget_ms:
            return True
        if len(samples_ms) < self.min_samples:
            return False
        timing = Timing.of(samples_ms)
        return timing.noise_ms <= self.margin * timing.time_ms


def measure(
    run: Callable[[], None],
    device: Device,
    rule: StoppingRule,
    *,
    deadline: float = math.inf,
    best_ms: float = math.inf,
    clock: Callable[[], float] | None = None,
) -> Timing:
    """Time `run` on `device` until the rule is satisfied or the deadline passes.

    After the deadline, in seconds on `clock`, the samples so far are final; without
    any, the warm-up counts. `best_ms` is the fastest time of other kernels so far.
    """
    clock = clock or time.monotonic
    warm = _sample(run, device)
    samples: list[float] = []
    if clock() + warm / 1e3 >= deadline:  # the next run would end too late
        return Timing(warm, 0.0, 0)
    # Far behind the best: one cold run is all that this kernel is worth.
    if warm > rule.hopeless * best_ms:
        return Timing(warm, 0.0, 1)
    # A slow kernel varies little: one warm run replaces the cold one.
    if warm > rule.budget_ms:
        return Timing.of([_sample(run, device)])
    while not rule.enough(samples):
        samples.append(_sample(run, device))
        if clock() + samples[-1] / 1e3 >= deadline:
            break
        if min(warm, samples[0]) > rule.behind * best_ms:
            break
    return Timing.of(samples)


def measure_together(
    runs: Sequence[Callable[[], None]],
    device: Device,
    rule: StoppingRule,
    *,
    launches: Sequence[int] | None = None,
    challenger: bool = False,
    deadline: float = math.inf,
    clock: Callable[[], float] | None = None,
) -> tuple[Timing, ...]:
    """Time several runs in turn, A B A B …, so that drift affects all equally.

    Each is timed `min_samples` times, whatever the budget: one run each would decide at
    random. There are two exceptions, after one round over the budget: every run of one,
    the warm-up included, took `clear` times as long as every run of all others; or the
    first is a `challenger` and was not faster than all others. `launches` is the number
    of kernels of each run, one if None.
    """
    clock = clock or time.monotonic
    counted = list(zip(runs, launches or [1] * len(runs), strict=True))
    warm = [_sample(run, device, count) for run, count in counted]
    round_s = sum(warm) / 1e3
    samples: list[list[float]] = [[] for _ in runs]
    while not all(len(s) >= rule.min_samples and rule.enough(s) for s in samples):
        if clock() + round_s >= deadline:
            break
        # A round over the budget may already show the order.
        if all(samples) and sum(map(sum, samples)) >= rule.budget_ms:
            mine, *others = map(min, samples)
            if challenger and any(mine >= other for other in others):
                break
            if _is_clear(warm, samples, rule.clear):
                break
        for (run, count), taken in zip(counted, samples, strict=True):
            taken.append(_sample(run, device, count))
    # No round was taken: the warm-ups are all there is.
    if not samples[0]:
        return tuple(Timing(w, 0.0, 0) for w in warm)
    return tuple(Timing.of(taken) for taken in samples)


def _is_clear(
    warm: Sequence[float], samples: Sequence[Sequence[float]], ratio: float
) -> bool:
    """Return whether more runs could not change the order of slow ones."""
    if len(samples) < 2 or not all(sum(taken) for taken in samples):
        return False
    runs = sorted(
        ([w, *taken] for w, taken in zip(warm, samples, strict=True)), key=min
    )
    return all(ratio * max(a) <= min(b) for a, b in itertools.pairwise(runs))


def _sample(run: Callable[[], None], device: Device, launches: int = 1) -> float:
    start = device.begin(launches)
    run()
    return device.elapsed_ms(start, device.record())
