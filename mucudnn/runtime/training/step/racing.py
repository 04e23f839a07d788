"""Time two implementations of the same function before a step is planned.

The choice affects the last bits of a training. So the times are cached with the
measurements, where every later process finds them, and stored in checkpoints, to resume
with another cache.
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
"""Milliseconds of the first and of the second implementation."""


def raced_once(
    tuner: Tuner,
    raced: Mapping[str, Any],
    known: dict[str, Times],
    used: dict[str, Times],
    measure: Callable[[], Times | None],
) -> Times | None:
    """Return the times of two implementations, measured once by any process.

    Args:
        tuner: Its cache stores the times, by device and `raced`.
        raced: Everything that determines the times; JSON values, others by their text.
        known: Times measured by this process, in addition to the cache; new ones are
            added.
        used: Times by which a trainer's choices were made; new ones are added.
        measure: Times both; None if that is impossible, which is not cached.
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
    """Run `work` on a bench with a pool of `nbytes`; None if there is no room.

    More than `memory` bytes are not tried. If the device has no room, `otherwise` is
    logged.
    """
    if memory is not None and nbytes > memory:
        return None
    try:
        with cold_bench(backend, [nbytes], memory, _RULE) as bench:
            return work(bench)
    except OutOfMemoryError as e:
        logger.warning("%s: %s", otherwise, e)
        return None
