"""Serialize captures within a process, across threads and forks.

PyTorch's tracers patch modules and functions for the whole process, so a step that
another thread captures meanwhile would be recorded wrongly or fail. Dynamo serializes
its own compilations by a lock. A capture holds that lock as well, and takes it first:
a backend is called with it, and a captured operation such as `torch.cond` takes it.
"""

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mucudnn.errors import BackendError
from mucudnn.processes import on_fork

CAPTURE_LOCK = threading.RLock()
"""Held while a step is captured, measured and planned. Take it by
`exclusive_capture`, which keeps the order of locks."""

_FORK_S = 5.0


@contextmanager
def exclusive_capture() -> Iterator[None]:
    """Prevent other threads from capturing or compiling in this context; reentrant.

    A fork waits up to five seconds until no other thread captures.

    Raises:
        BackendError: The process was forked while another thread captured.
    """
    locks = _locks()
    if locks.cut:
        raise BackendError(
            "this process was forked while another thread captured or compiled a "
            "step, which is incomplete here; fork before or after that, or use the "
            "start method 'spawn'"
        )
    with locks.dynamo, CAPTURE_LOCK:
        yield


class _Locks:
    """Both locks, which are acquired around a fork.

    Attributes:
        dynamo: The lock of Dynamo.
        cut: Whether another thread held one of them when this process was forked.
    """

    def __init__(self) -> None:
        from torch._dynamo.convert_frame import compile_lock

        self.dynamo = compile_lock
        self.cut = False
        self._held = threading.local()
        on_fork(self)

    def before_fork(self) -> None:
        """Wait for a limited time until no other thread captures."""
        until = time.monotonic() + _FORK_S
        self._held.locks = held = []
        for lock in (self.dynamo, CAPTURE_LOCK):
            if lock.acquire(timeout=max(0.0, until - time.monotonic())):
                held.append(lock)

    def after_fork(self, *, child: bool) -> None:
        """Release the locks; those not acquired are never released in a child."""
        held = self._held.locks
        self.cut = self.cut or (child and len(held) < 2)
        for lock in reversed(held):
            lock.release()


_locks = functools.cache(_Locks)
