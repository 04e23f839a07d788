"""Copies to the host and back, beside the computation, in two lanes.

Host memory does not come from PyTorch's allocator, so that it is not counted as the
device's. A lane is a thread, and the device is the CPU. A copy of few bytes takes less
time than waking a thread does: it is made where it is asked for. A forked child has
threads and memory of its own.

Bytes are moved by the C library, not by an operation of PyTorch's: that would start
threads of its own beside the computation's, and hold Python's lock for longer, for
which the computation has to wait.
"""

import ctypes
import mmap
import queue
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import TypeAlias

import torch

from mucudnn.processes import Own

MANY = 256 << 10
"""Bytes that are worth a thread: fewer are copied at once."""


_Bytes: TypeAlias = torch.Tensor | torch.UntypedStorage
"""All bytes of one of them, which lie without gaps."""


class Leaving:
    """A storage that has left or is on its way.

    Args:
        host: Its bytes on the host.
        done: A lock that is free when its last copy is done; None if it is.
    """

    __slots__ = ("done", "host")

    def __init__(
        self, host: torch.Tensor, done: "threading.Lock | None" = None
    ) -> None:
        self.host = host
        self.done = done

    def wait(self) -> None:
        """Wait for the last copy that was begun."""
        if self.done is not None:
            with self.done:
                pass


class ThreadCopies:
    """Copies by two threads, which begin when the first copy does.

    Args:
        reuse: Keep the host's bytes of every slot from step to step. Not where two
            steps may be under way at once: there bytes are used again when nobody holds
            them any more.
    """

    def __init__(self, *, reuse: bool) -> None:
        self._hosts: dict[Hashable, torch.Tensor] | None = {} if reuse else None
        self._memory = _HostMemory()
        self._lanes = Own(lambda: (_Lane(), _Lane()))

    def begin(self) -> Callable[[torch.Tensor, str], Leaving]:
        """What begins copies out in one run."""
        return self.out

    def out(self, tensor: torch.Tensor, slot: Hashable) -> Leaving:
        """Begin to copy the storage of a tensor to the host."""
        storage = tensor.untyped_storage()
        host = None if self._hosts is None else self._hosts.get(slot)
        if host is None:
            host = self._memory.take(storage.nbytes())
            if self._hosts is not None:
                self._hosts[slot] = host
        out, _ = self._lanes.mine
        return Leaving(host, out.copy(storage, host, host.numel(), None))

    def back(self, leaving: Leaving) -> torch.Tensor:
        """Begin to copy it back; the bytes that it will have."""
        host = leaving.host
        found = torch.empty(host.numel(), dtype=torch.uint8)
        _, back = self._lanes.mine
        leaving.done = back.copy(host, found, host.numel(), leaving.done)
        return found

    def home(self, tensor: torch.Tensor, leaving: Leaving) -> None:
        """Begin to copy the storage of a tensor to where it came from."""
        storage = tensor.untyped_storage()
        host = leaving.host
        out, _ = self._lanes.mine
        leaving.done = out.copy(storage, host, host.numel(), leaving.done)

    def left(self, host: torch.Tensor, storage: str) -> Leaving:
        """What is on the host, and has no copy under way."""
        return Leaving(host)

    def settle(self) -> None:
        """Wait for all copies: one may write what a user is about to restore."""
        for lane in self._lanes.mine:
            Leaving(torch.empty(0), lane.last).wait()


class _HostMemory:
    """Bytes of the host that are used again once no tensor has them.

    A page that is touched for the first time costs ten times what a copy of it does.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """So many bytes that nobody has."""
        free = self._free.setdefault(nbytes, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = _mapped(nbytes)
        held = memoryview(memory)  # the tensor's storage holds on to it
        weakref.finalize(held, free.append, memory).atexit = False
        return torch.frombuffer(held, dtype=torch.uint8)[:nbytes]


class _Lane:
    """Copies in their order, by one thread that is started when it is needed."""

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
        """Queue one copy, after another; a lock that is free when it is done.

        None if it is done already.
        """
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


class _Job:
    """One copy; lets go of its bytes before it says that it is done."""

    __slots__ = ("after", "done", "nbytes", "source", "target")

    def __init__(
        self,
        source: _Bytes,
        target: _Bytes,
        nbytes: int,
        after: "threading.Lock | None",
        done: threading.Lock,
    ) -> None:
        self.source = source
        self.target = target
        self.nbytes = nbytes
        self.after = after
        self.done = done

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
    """Copy so many bytes here and now, in this thread."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)


def host_bytes(nbytes: int) -> torch.Tensor:
    """Bytes of the host that are not of PyTorch's allocator."""
    return torch.frombuffer(_mapped(nbytes), dtype=torch.uint8)[:nbytes]


def _mapped(nbytes: int) -> mmap.mmap:
    """Memory of this process alone: `mmap` shares it with forked children otherwise."""
    flags = {}
    if hasattr(mmap, "MAP_PRIVATE"):  # Windows has no forks
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    return mmap.mmap(-1, max(1, nbytes), **flags)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
