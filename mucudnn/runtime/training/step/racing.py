"""Two ways to compute the same, timed beside each other before a step is planned."""

import logging
from collections.abc import Callable
from typing import TypeVar

from mucudnn.backends.base import Backend
from mucudnn.errors import OutOfMemoryError
from mucudnn.runtime.profiling.cold_timing import ColdBench, cold_bench
from mucudnn.runtime.tuning.timing import StoppingRule

__all__ = ["timed_within"]

logger = logging.getLogger(__name__)

_RULE = StoppingRule(min_samples=3, max_samples=9, budget_ms=60.0)

T = TypeVar("T")


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
