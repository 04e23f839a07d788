"""Two ways to compute the same, timed beside each other before a step is planned.

Which is faster decides the last bits of a training. So what they took is kept where
measurements are, and found there by every later process that has them to choose from;
and by a training's checkpoints, for going on with another cache.
"""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mucudnn.backends.base import Backend
from mucudnn.errors import OutOfMemoryError
from mucudnn.runtime.profiling.cold_timing import ColdBench, cold_bench
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["Times", "raced_once", "timed_within"]

logger = logging.getLogger(__name__)

_RULE = StoppingRule(min_samples=3, max_samples=9, budget_ms=60.0)

T = TypeVar("T")

Times = tuple[float, float]
"""Milliseconds of the first way, and of the second."""


def raced_once(
    tuner: Tuner,
    raced: Mapping[str, Any],
    known: dict[str, Times],
    used: dict[str, Times],
    measure: Callable[[], Times | None],
) -> Times | None:
    """What two ways took when they were first timed, by whatever process.

    Args:
        tuner: Its cache remembers, by the device and what else was raced.
        raced: All that decides the times, in what JSON has; other values by their text.
        known: What this process has found, which all its steps share and caches in
            memory do not; it grows.
        used: What a trainer's choices were made by; it grows.
        measure: Times them; None where that cannot be, which is not remembered.
    """
    key = json.dumps(dict(raced), sort_keys=True, default=str)
    cache, fingerprint = tuner.cache, tuner.backend.device.fingerprint
    times = cache.get_race(fingerprint, key)
    if times is None:
        times = known.get(key) or measure()
        if times is None:
            return None
        times = cache.put_race(fingerprint, key, times)
    known[key] = used[key] = times
    return times


def timed_within(
    backend: Backend,
    nbytes: int,
    memory: int | None,
    otherwise: str,
    work: Callable[[ColdBench], T],
) -> T | None:
    """What a bench finds; None where there is no room, which of a device is logged.

    Args:
        backend: Computes.
        nbytes: Of the working set.
        memory: The most that there may be; any size if not given.
        otherwise: What is said if the device has no room.
        work: Asks the bench.
    """
    if memory is not None and nbytes > memory:
        return None
    try:
        with cold_bench(backend, [nbytes], memory, _RULE) as bench:
            return work(bench)
    except OutOfMemoryError as e:
        logger.warning("%s: %s", otherwise, e)
        return None
