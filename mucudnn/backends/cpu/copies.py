"""Asynchronous copies on the CPU: one thread per direction, overlapped with kernels.

`np.copyto` of large byte views releases the interpreter lock. Kernels have finished
when they return, so a requested copy may start at once.
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
from mucudnn.processes import PerProcess

CHUNK = 4 << 20
"""Bytes copied between two checks whether to stop."""

Copy = Callable[[Any, Any], None]


class CpuTicket:
    """A copy: done, failed or dropped once the event `over` is set."""

    __slots__ = ("failed", "over", "process")

    def __init__(self) -> None:
        self.process = os.getpid()
        self.over = threading.Event()
        self.failed = False

    def wait(self) -> None:
        """Wait until the copy is over; raise BackendError if a fork left it pending."""
        if self.process != os.getpid() and not self.over.is_set():
            raise BackendError(
                "a copy was under way when this process was forked, and is not made "
                "here; finish all copies before forking, or begin them afterwards"
            )
        self.over.wait()


class _SharedState:
    """State shared by both queues: the request to stop, and the first failure."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.error: BackendError | None = None
        self.queues: list[queue.SimpleQueue[Any]] = []
        self._lock = PerProcess(threading.Lock)

    def fail(self, error: Exception, what: str) -> None:
        with self._lock.value:
            if self.error is None:
                text = error if isinstance(error, MucudnnError) else repr(error)
                self.error = BackendError(f"a copy {what} failed: {text}")
                self.error.__cause__ = error

    def stop(self) -> None:
        self.stopped.set()
        for jobs in self.queues:
            jobs.put(None)


class CpuCopier:
    """Two copy threads, started by the first copy, ended by `close` or collection."""

    def __init__(self, copy: Copy | None = None) -> None:
        self._copy = copy or copy_bytes
        self._state = _SharedState()
        self._threads = PerProcess(
            dict[str, tuple[threading.Thread, queue.SimpleQueue[Any]]]
        )
        self._last: dict[str, CpuTicket] = {}
        weakref.finalize(self, self._state.stop)

    def out(
        self, source: Any, target: Any, after: Sequence[CpuTicket] = ()
    ) -> CpuTicket:
        """Copy to other memory that represents the host."""
        return self._start("to the host", source, target, after)

    def back(
        self, source: Any, target: Any, after: Sequence[CpuTicket] = ()
    ) -> CpuTicket:
        """Copy from memory that represents the host."""
        return self._start("from the host", source, target, after)

    def prebind(self, way: Way, source: Any, target: Any) -> Start:
        """Return a function that starts this copy; nothing is prepared."""
        return partial(self.out if way == "out" else self.back, source, target)

    def wait(self, ticket: CpuTicket) -> None:
        """Wait for a copy: on the CPU the host is the compute queue."""
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
        """Stop after the chunks in progress, and join the threads."""
        self._state.stop()
        for thread, _ in self._threads.value.values():
            if thread.is_alive():  # Ctrl-C may have come before it began
                thread.join()
        self._threads.value.clear()

    def _start(
        self, what: str, source: Any, target: Any, after: Sequence[CpuTicket]
    ) -> CpuTicket:
        self._check()
        if self._state.stopped.is_set():
            raise BackendError(f"a copy {what} was asked of a closed copier")
        source, target = _bytes(source), _bytes(target)
        if source.size != target.size:
            raise BackendError(
                f"a copy {what} of {source.size} bytes was given {target.size}"
            )
        ticket = CpuTicket()
        threads = self._threads.value
        if what not in threads:
            jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
            thread = threading.Thread(
                target=_serve,
                args=(jobs, self._state, self._copy, what),
                name=f"mucudnn copies {what}",
                daemon=True,
            )
            self._state.queues.append(jobs)
            threads[what] = (thread, jobs)
            thread.start()
        threads[what][1].put((source, target, tuple(after), ticket))
        self._last[what] = ticket
        return ticket

    def _check(self) -> None:
        if (error := self._state.error) is not None:
            raise BackendError(str(error)) from error.__cause__


def _serve(
    jobs: "queue.SimpleQueue[Any]", state: _SharedState, copy: Copy, what: str
) -> None:
    """Run a queue's copies, without a reference to the copier: it can be collected."""
    while (job := jobs.get()) is not None:
        source, target, after, ticket = job
        try:
            for earlier in after:
                earlier.wait()
            lost = any(earlier.failed for earlier in after)  # maybe of another copier
            ticket.failed = lost or not _copy_chunks(source, target, state, copy)
            if lost:
                state.fail(BackendError("one that it waits for was not made"), what)
        except Exception as e:  # any failure must reach the waiting thread
            ticket.failed = True
            state.fail(e, what)
        finally:
            del source, target, job
            ticket.over.set()


def _copy_chunks(source: Any, target: Any, state: _SharedState, copy: Copy) -> bool:
    """Copy chunk by chunk; return False if stopped or after a failure elsewhere."""
    for at in range(0, source.size, CHUNK):
        if state.stopped.is_set() or state.error is not None:
            return False
        copy(source[at : at + CHUNK], target[at : at + CHUNK])
    return True


def copy_bytes(source: Any, target: Any) -> None:
    """Copy bytes between views of one size, which may be memory-mapped files."""
    np.copyto(target, source)
    _release_pages(source)
    _release_pages(target)


def _release_pages(view: Any) -> None:
    """Release the pages of a view if it is a memory-mapped file.

    Touched pages of a file count as the process's own memory until the system needs
    them, so tensors offloaded to a file would stay in memory after all. No data is
    lost: written pages go to the file, reads come from the file or the page cache.
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
