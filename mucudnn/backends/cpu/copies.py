"""Copies on the CPU: a worker thread a direction, so that they overlap with kernels.

`np.copyto` of large byte views lets other threads run. Kernels have finished when they
return, so a copy that is asked for may begin at once.
"""

import mmap
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mucudnn.backends.device import Start, Way
from mucudnn.errors import BackendError, MucudnnError
from mucudnn.forks import Own

__all__ = ["CHUNK", "CpuCopier", "CpuTicket", "copy_bytes"]

CHUNK = 4 << 20
"""Bytes copied between two looks at whether to stop."""

Copy = Callable[[Any, Any], None]


class CpuTicket:
    """One copy: done, failed or dropped once `over` is set."""

    __slots__ = ("failed", "over", "process")

    def __init__(self) -> None:
        self.process = os.getpid()
        self.over = threading.Event()
        self.failed = False

    def wait(self) -> None:
        """Until it is over, which in a fork of its process it may never be.

        Raises:
            BackendError: It was not over when this process was forked.
        """
        if self.process != os.getpid() and not self.over.is_set():
            raise BackendError(
                "a copy was under way when this process was forked, and is not made "
                "here; finish all copies before forking, or begin them afterwards"
            )
        self.over.wait()


class _Fate:
    """What both queues share: whether to stop, and the first failure."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.error: BackendError | None = None
        self.queues: list[queue.SimpleQueue[Any]] = []
        self._lock = Own(threading.Lock)

    def fail(self, error: Exception, what: str) -> None:
        with self._lock.mine:
            if self.error is None:
                told = error if isinstance(error, MucudnnError) else repr(error)
                self.error = BackendError(f"a copy {what} failed: {told}")
                self.error.__cause__ = error

    def stop(self) -> None:
        self.stopped.set()
        for jobs in self.queues:
            jobs.put(None)


class CpuCopier:
    """Two threads, started by the first copy and ended by `close` or collection.

    Args:
        copy: Copies some bytes, source to target.
    """

    def __init__(self, copy: Copy | None = None) -> None:
        self._copy = copy or copy_bytes
        self._fate = _Fate()
        self._lanes = Own(dict[str, tuple[threading.Thread, queue.SimpleQueue[Any]]])
        self._last: dict[str, CpuTicket] = {}
        weakref.finalize(self, self._fate.stop)

    def out(
        self, source: Any, target: Any, after: Sequence[CpuTicket] = ()
    ) -> CpuTicket:
        """Copy to other host memory that plays the host."""
        return self._start("to the host", source, target, after)

    def back(
        self, source: Any, target: Any, after: Sequence[CpuTicket] = ()
    ) -> CpuTicket:
        """Copy from host memory that plays the host."""
        return self._start("from the host", source, target, after)

    def bound(self, way: Way, source: Any, target: Any) -> Start:
        """A copy to start over and over; nothing can be made ahead."""
        return partial(self.out if way == "out" else self.back, source, target)

    def wait(self, ticket: CpuTicket) -> None:
        """Wait: on the CPU the host is the compute queue."""
        ticket.wait()
        self._check()
        if ticket.failed:
            raise BackendError("a copy was dropped: its copier was closed")

    def finish(self) -> None:
        """Wait for the last copy of each queue."""
        for ticket in self._last.values():
            ticket.wait()
        self._check()

    def close(self) -> None:
        """Stop after the chunks that are being copied, and join the threads."""
        self._fate.stop()
        for thread, _ in self._lanes.mine.values():
            if thread.is_alive():  # Ctrl-C may have come before it began
                thread.join()
        self._lanes.mine.clear()

    def _start(
        self, what: str, source: Any, target: Any, after: Sequence[CpuTicket]
    ) -> CpuTicket:
        self._check()
        if self._fate.stopped.is_set():
            raise BackendError(f"a copy {what} was asked of a closed copier")
        source, target = _bytes(source), _bytes(target)
        if source.size != target.size:
            raise BackendError(
                f"a copy {what} of {source.size} bytes was given {target.size}"
            )
        ticket = CpuTicket()
        self._lane(what).put((source, target, tuple(after), ticket))
        self._last[what] = ticket
        return ticket

    def _lane(self, what: str) -> "queue.SimpleQueue[Any]":
        lanes = self._lanes.mine
        if what not in lanes:
            jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
            thread = threading.Thread(
                target=_work,
                args=(jobs, self._fate, self._copy, what),
                name=f"mucudnn copies {what}",
                daemon=True,
            )
            self._fate.queues.append(jobs)
            lanes[what] = (thread, jobs)
            thread.start()
        return lanes[what][1]

    def _check(self) -> None:
        if (error := self._fate.error) is not None:
            raise BackendError(str(error)) from error.__cause__


def _work(jobs: "queue.SimpleQueue[Any]", fate: _Fate, copy: Copy, what: str) -> None:
    """A worker: it knows the queue and not the copier, which can thus be collected."""
    while (job := jobs.get()) is not None:
        source, target, after, ticket = job
        try:
            for earlier in after:
                earlier.wait()
            lost = any(earlier.failed for earlier in after)  # perhaps another tier's
            ticket.failed = lost or not _carry(source, target, fate, copy)
            if lost:
                fate.fail(BackendError("one that it waits for was not made"), what)
        except Exception as e:  # whatever it is, the thread that waits has to hear it
            ticket.failed = True
            fate.fail(e, what)
        finally:
            del source, target, job
            ticket.over.set()


def _carry(source: Any, target: Any, fate: _Fate, copy: Copy) -> bool:
    """Copy chunk by chunk; False if there is no point any more."""
    for at in range(0, source.size, CHUNK):
        if fate.stopped.is_set() or fate.error is not None:
            return False
        copy(source[at : at + CHUNK], target[at : at + CHUNK])
    return True


def copy_bytes(source: Any, target: Any) -> None:
    """Copy bytes between views of one size, which may be of files."""
    np.copyto(target, source)
    for side in (source, target):
        _let_go_of_pages(side)


def _let_go_of_pages(view: Any) -> None:
    """Give the pages of a view back to the system, if they are those of a file.

    A page of a file that was touched counts as the process's own until the system needs
    it, so that data that has left for a file would be in memory after all. Nothing is
    lost: what was written goes to the file, what is read again comes from there, or
    from the system's cache of it.
    """
    owner = view
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = view.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    owner.madvise(mmap.MADV_DONTNEED, first, start + view.nbytes - first)


def _bytes(array: Any) -> Any:
    return array.reshape(-1).view(np.uint8)
