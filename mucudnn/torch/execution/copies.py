"""Copies to the host and back by two threads, for programs on the CPU.

Host memory does not come from PyTorch's allocator, so it is not counted as the
device's. The threads are those of `CpuCopier`: one offloads and one prefetches. A small
copy takes less time than waking a thread, so it is made at once.

Bytes are moved by NumPy, not by an operation of PyTorch: that would start threads
beside those of the computation, and hold Python's global lock for longer.
"""

import mmap
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mucudnn.backends.cpu.device import CpuCopier, CpuTicket
from mucudnn.backends.device import Way

MANY = 256 << 10
"""Bytes from which on a copy is handed to a thread."""


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
        self._copier = CpuCopier(move)

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
        offloaded.done = self._begun("back", host, found, offloaded.done)
        return found

    def write_back(self, tensor: torch.Tensor, offloaded: OffloadedStorage) -> None:
        """Begin to copy the storage of a tensor to the bytes that it came from."""
        whole, host = bytes_of(tensor), offloaded.host
        offloaded.done = self._begun("out", whole, host, offloaded.done)

    def on_host(self, host: torch.Tensor, storage: str) -> OffloadedStorage:
        """Return a storage that is on the host, with no copy in flight."""
        return OffloadedStorage(host, self)

    def synchronize(self) -> None:
        """Wait for all copies: one may write what a user is about to restore."""
        self._copier.finish()

    def wait(self, done: CpuTicket) -> None:
        """Wait for a copy."""
        self._copier.wait(done)

    def _begun(
        self, way: Way, source: torch.Tensor, target: torch.Tensor, after: Any
    ) -> CpuTicket | None:
        """Begin to copy bytes behind another copy; None if they are copied already."""
        if target.numel() >= MANY:
            begin = self._copier.prebind(way, source.numpy(), target.numpy())
            ticket: CpuTicket = begin(() if after is None else (after,))
            return ticket
        if after is not None:
            after.wait()
        move(source.numpy(), target.numpy())
        return None


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


def move(source: Any, target: Any) -> None:
    """Copy bytes in the calling thread."""
    np.copyto(target, source)


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
