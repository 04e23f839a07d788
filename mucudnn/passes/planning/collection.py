"""Less frequent garbage collection during a search.

A search makes and drops thousands of small objects per trial, hardly any of them in
cycles; collecting cycles over the whole process takes a fifth of its time.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 100_000
"""Net allocations before a collection of the youngest generation."""

_ONE = threading.Lock()
"""Lock of the thread that changed the process-wide thresholds."""


@contextmanager
def gc_relaxed() -> Iterator[None]:
    """Collect garbage less often within the context, and restore the thresholds.

    The context has no effect inside another one, beside another thread's, or if
    collection is off or less frequent already.
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
