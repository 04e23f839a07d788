"""A fixed crew of threads that share the work of a kernel.

Kernels split their own work and call single-threaded BLAS from each thread, so that
copies and transforms run in parallel too, not only the matrix products.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

from mucudnn.backends.cpu.scratch import Scratch
from mucudnn.forks import Own, attend

__all__ = ["Workers", "as_kernels"]

T = TypeVar("T")

_UFUNC_BUFFER = 256
_FORK_S = 5.0


@contextmanager
def as_kernels() -> Iterator[None]:
    """Run the body with the NumPy settings of a library's kernels, on this thread only.

    NumPy's buffers are short. It copies operands that are not contiguous through
    buffers of 8192 elements each, which is unaccounted memory. With short buffers it
    also copies less, because runs longer than a buffer are used directly.

    Warnings are off: infinities and NaNs in a result are an answer, on which loss
    scaling relies, and some algorithms produce them as intermediates.
    """
    with np.errstate(all="ignore"):  # restores the size as well
        np.setbufsize(_UFUNC_BUFFER)
        yield


class _SerialBlas:
    """A limit of BLAS to one thread while any convolution runs; re-entrant, shared."""

    def __init__(self) -> None:
        self._libraries = ThreadpoolController().select(user_api="blas").lib_controllers
        self._changed = Own(threading.Condition)
        self._users: list[int] = []  # threads inside `limited`, once per entry
        self._saved: list[int] = []
        self.num_threads = max((lib.num_threads for lib in self._libraries), default=1)
        attend(self)

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Limit BLAS to one thread until this and all other bodies have ended."""
        process, thread = os.getpid(), threading.get_ident()
        with self._changed.mine:
            if not self._users:
                self._saved = [lib.num_threads for lib in self._libraries]
                for lib in self._libraries:
                    lib.set_num_threads(1)
            self._users.append(thread)
        try:
            yield
        finally:
            with self._changed.mine:
                if process == os.getpid():  # otherwise `after_fork` has reset the users
                    self._users.remove(thread)
                    if not self._users:
                        self._restore()
                    self._changed.mine.notify_all()

    def _restore(self) -> None:
        for lib, n in zip(self._libraries, self._saved, strict=False):
            lib.set_num_threads(n)
        self._saved = []

    def before_fork(self) -> None:
        """Wait, within `_FORK_S`, for other threads' convolutions, and start none.

        OpenBLAS ends its threads before a fork: a product in progress would never be
        finished, not even in the parent.
        """
        changed, me = self._changed.mine, threading.get_ident()
        changed.acquire()
        changed.wait_for(lambda: {*self._users} <= {me}, timeout=_FORK_S)

    def after_fork(self, *, child: bool) -> None:
        """Reset the limit in a child, where the threads that set it do not exist."""
        if child:
            self._users = []
            self._restore()
        else:
            self._changed.mine.release()


class _Queue(Iterator[T]):
    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)


class Workers:
    """A fixed crew of threads, the caller's included.

    Args:
        count: Threads; as many as the BLAS library has if not given, so that
            `OMP_NUM_THREADS` and `OPENBLAS_NUM_THREADS` are obeyed.
    """

    def __init__(self, count: int | None = None) -> None:
        self._blas = _SerialBlas()
        self.count = count or self._blas.num_threads
        self.scratch = Scratch()
        self._pool = Own(self._start)

    def _start(self) -> ThreadPoolExecutor | None:
        if self.count == 1:
            return None
        return ThreadPoolExecutor(self.count - 1, thread_name_prefix="mucudnn")

    def each(
        self,
        items: Iterable[T],
        fn: Callable[[int, T], object],
        at_most: int | None = None,
    ) -> None:
        """Call `fn(worker, item)` once per item; idle workers take the next one.

        `worker` is below `at_most` (or `count`) and belongs to one thread at a time: it
        can index private buffers. The assignment of items to workers is not
        deterministic: results must not depend on it. The first exception is re-raised
        after all have stopped.
        """
        queue = _Queue(items)

        def drain(worker: int) -> None:
            with as_kernels():
                for item in queue:
                    fn(worker, item)

        with self._blas.limited():
            if (pool := self._pool.mine) is None:
                drain(0)
                return
            crew = min(self.count, at_most or self.count)
            # The pool keeps a submitted task alive until a thread has taken it from
            # its queue, even if cancelled: the task must not reference the operands.
            shared = [drain]
            futures = [pool.submit(_take_part, shared, i) for i in range(1, crew)]
            try:
                drain(0)
            finally:
                # Tasks that have not started have nothing left to do. Waiting for them
                # would deadlock if the caller is itself a thread of the pool.
                errors = [f.exception() for f in futures if not f.cancel()]
                shared.clear()
            for error in errors:
                if error is not None:
                    raise error

    def ranges(self, total: int, fn: Callable[[int, int, int], None]) -> None:
        """Call `fn(worker, start, stop)` once a worker, over equal, fixed shares."""
        step = max(1, -(-total // self.count))
        shares = [(i, min(i + step, total)) for i in range(0, total, step)]
        indexed = list(enumerate(shares))
        self.each(indexed, lambda _, item: fn(item[0], item[1][0], item[1][1]))


def _take_part(shared: Sequence[Callable[[int], None]], worker: int) -> None:
    shared[0](worker)
