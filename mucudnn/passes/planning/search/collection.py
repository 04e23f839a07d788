"""Less garbage collection while much is tried.

A search makes and drops thousands of small objects a trial, hardly any of them in
cycles: looking for cycles among all that the process has takes a fifth of its time.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["rarely_collected"]

_YOUNG = 100_000
"""Objects made, beyond those dropped, before the youngest are looked through."""

_ONE = threading.Lock()
"""Held by whoever has changed the collector's thresholds, which are the process's."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Collect more rarely; what was set before is restored, also behind an error.

    Within another, or beside one of another thread, it changes nothing. Nor does it
    where collection is off, or rarer already.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _YOUNG or not _ONE.acquire(blocking=False):
        yield
        return
    try:
        gc.set_threshold(_YOUNG, *before[1:])
        yield
    finally:
        gc.set_threshold(*before)
        _ONE.release()
