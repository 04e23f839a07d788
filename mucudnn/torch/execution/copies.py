"""Copies to the host and back by two threads, for programs on the CPU.

Host memory does not come from PyTorch's allocator, so it is not counted as the
device's. One thread offloads and one prefetches. A small copy takes less time than
waking a thread, so it is made at once. A forked child has its own threads and memory.

Bytes are moved by the C library, not by an operation of PyTorch: that would start
threads beside those of the computation, and hold Python's global lock for longer.
"""

import ctypes
import mmap
import queue
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from mucudnn.processes import PerProcess

MANY = 256 << 10
"""Bytes from which on a copy is handed to a thread."""

_Bytes: TypeAlias = torch.Tensor | torch.UntypedStorage
"""A storage, or a tensor whose elements are contiguous."""


@dataclass(slots=True, eq=False)
class OffloadedStorage:
    """An offloaded storage.

    Attributes:
        host: Its bytes on the host, or in a tier.
        copier: Makes its copies, and waits for one by what stands for its end.
        done: Stands for the end of its last copy; None if no copy is in flight.
    """

    host: torch.Tensor
    copier: Any
    done: Any = None

    def wait(self) -> None:
        """Wait for the last copy that was begun.

        Raises:
            BackendError: It failed, for instance because another process has ended.
        """
        if self.done is not None:
            self.copier.wait(self.done)


class ThreadCopies:
    """Copies by two threads, which start with the first copy.

    Args:
        reuse: Keep the host memory of every storage from step to step. Not for steps of
            which two may be in flight at once: then memory is reused when no tensor
            holds it any more.
    """

    def __init__(self, *, reuse: bool) -> None:
        self._hosts: dict[Hashable, torch.Tensor] | None = {} if reuse else None
        self._memory = _HostMemory()
        self._threads = PerProcess(lambda: (_CopyThread(), _CopyThread()))

    def start_run(self) -> Callable[[torch.Tensor, str], OffloadedStorage]:
        """Return the function that offloads a tensor of a storage in one run."""
        return self.offload

    def offload(self, tensor: torch.Tensor, slot: Hashable) -> OffloadedStorage:
        """Begin to copy the storage of a tensor to the host."""
        host = None if self._hosts is None else self._hosts.get(slot)
        if host is None:
            host = self._memory.take(tensor.untyped_storage().nbytes())
            if self._hosts is not None:
                self._hosts[slot] = host
        offloaded = OffloadedStorage(host, self)
        self.write_back(tensor, offloaded)
        return offloaded

    def prefetch(self, offloaded: OffloadedStorage) -> torch.Tensor:
        """Begin to copy an offloaded storage back; return its new bytes."""
        host = offloaded.host
        found = torch.empty(host.numel(), dtype=torch.uint8, device="cpu")
        _, back = self._threads.value
        offloaded.done = back.copy(host, found, host.numel(), offloaded.done)
        return found

    def write_back(self, tensor: torch.Tensor, offloaded: OffloadedStorage) -> None:
        """Begin to copy the storage of a tensor to the bytes that it came from."""
        storage = tensor.untyped_storage()
        host = offloaded.host
        out, _ = self._threads.value
        offloaded.done = out.copy(storage, host, host.numel(), offloaded.done)

    def on_host(self, host: torch.Tensor, storage: str) -> OffloadedStorage:
        """Return a storage that is on the host, with no copy in flight."""
        return OffloadedStorage(host, self)

    def synchronize(self) -> None:
        """Wait for all copies: one may write what a user is about to restore."""
        for thread in self._threads.value:
            if thread.last is not None:
                self.wait(thread.last)

    def wait(self, done: threading.Lock) -> None:
        """Wait for a copy, whose lock is free when it is done."""
        with done:
            pass


class _HostMemory:
    """Host memory that is reused once no tensor holds it.

    A page that is touched for the first time costs ten times the copy of it.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """Return this many bytes that no other tensor holds."""
        free = self._free.setdefault(nbytes, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = _mapped(nbytes)
        held = memoryview(memory)  # the tensor's storage holds on to it
        weakref.finalize(held, free.append, memory).atexit = False
        return torch.frombuffer(held, dtype=torch.uint8)[:nbytes]


class _CopyThread:
    """Makes copies in their order, in a thread that starts when it is needed."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.last: threading.Lock | None = None
        self._started = False
        weakref.finalize(self, self.jobs.put, None)

    def copy(
        self,
        source: _Bytes,
        target: _Bytes,
        nbytes: int,
        after: "threading.Lock | None",
    ) -> "threading.Lock | None":
        """Queue one copy, after another; return a lock that is free when it is done.

        None if it is done already.
        """
        # Handing a small copy to the thread takes longer than copying it.
        if nbytes < MANY:
            if after is not None:
                with after:
                    pass
            move(source, target, nbytes)
            return None
        if not self._started:
            threading.Thread(target=_work, args=(self.jobs,), daemon=True).start()
            self._started = True
        self.last = done = threading.Lock()
        done.acquire()
        self.jobs.put(_Job(source, target, nbytes, after, done))
        return done


@dataclass(slots=True, eq=False)
class _Job:
    """One copy; drops its references to the bytes before it reports to be done."""

    source: _Bytes
    target: _Bytes
    nbytes: int
    after: "threading.Lock | None"
    done: threading.Lock

    def __call__(self) -> None:
        if self.after is not None:
            with self.after:
                pass
        try:
            move(self.source, self.target, self.nbytes)
        finally:
            del self.source, self.target
            self.done.release()


def _work(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job()


def move(source: _Bytes, target: _Bytes, nbytes: int) -> None:
    """Copy bytes in the calling thread."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)


def host_bytes(nbytes: int) -> torch.Tensor:
    """Return host memory that is not of PyTorch's allocator."""
    return torch.frombuffer(_mapped(nbytes), dtype=torch.uint8)[:nbytes]


def _mapped(nbytes: int) -> mmap.mmap:
    """Map memory of this process alone: by default forked children share a mapping."""
    flags = {}
    if hasattr(mmap, "MAP_PRIVATE"):  # Windows has no forks
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    return mmap.mmap(-1, max(1, nbytes), **flags)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
