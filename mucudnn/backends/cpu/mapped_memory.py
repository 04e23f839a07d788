"""Host memory mapped at several addresses: one anonymous file, mapped in pieces.

The file has no name (`memfd_create`), so it ends with the process however that ends.
All of its bytes are allocated at once: if the system has too few, this is an error at
that point rather than the end of the process at a later write. A forked child has none
of these addresses: it would write into its parent's memory.
"""

import ctypes
import errno
import functools
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mucudnn.backends.device import check_chunks, runs
from mucudnn.errors import BackendError, OutOfMemoryError, UnsupportedError
from mucudnn.ir.sizes import exact_bytes

_CHUNK = 64 << 10  # bytes: many pages, so that a step has few thousand mappings
_FIXED, _NO_RESERVE, _NO_ACCESS = 0x10, 0x4000, 0
"""Linux flags that Python's `mmap` lacks, at least in some releases."""

_FAILED = ctypes.c_size_t(-1).value
_MOST = "/proc/sys/vm/max_map_count"


class CpuMapper:
    """A mapper of host memory in chunks of whole pages."""

    def __init__(self, available: Callable[[], int], chunk_bytes: int = _CHUNK) -> None:
        if chunk_bytes <= 0 or chunk_bytes % mmap.PAGESIZE:
            raise ValueError(
                f"chunks of {chunk_bytes} bytes cannot be mapped; their size must be "
                f"a multiple of {mmap.PAGESIZE}"
            )
        self._available = available
        self.chunk_bytes = chunk_bytes

    def allocate(self, chunks: int) -> "CpuMappedMemory":
        """Allocate chunks in one file without a name."""
        create: Any = getattr(os, "memfd_create", None)
        if create is None:
            raise UnsupportedError(
                f"memory cannot be mapped on this system ({os.name}, no memfd_create): "
                "use the static placement"
            )
        nbytes = chunks * self.chunk_bytes
        if nbytes > self._available():
            raise OutOfMemoryError(
                f"no room for {exact_bytes(nbytes)}: {exact_bytes(self._available())} "
                "are available"
            )
        fd: int = create("mucudnn", os.MFD_CLOEXEC)
        found = CpuMappedMemory(fd, chunks, self.chunk_bytes)
        try:
            if nbytes:
                os.posix_fallocate(fd, 0, nbytes)
        except (OSError, OverflowError) as e:
            raise OutOfMemoryError(f"no room for {exact_bytes(nbytes)}: {e}") from e
        return found


class CpuMappedMemory:
    """A file's bytes, mapped at any number of addresses."""

    def __init__(self, fd: int, chunks: int, chunk_bytes: int) -> None:
        self._fd, self._chunks, self._size = fd, chunks, chunk_bytes
        weakref.finalize(self, os.close, fd).atexit = False

    def map(self, chunks: Sequence[int]) -> Any:
        """Return a NumPy array of bytes over contiguous addresses."""
        check_chunks(chunks, self._chunks)
        if not chunks:
            return np.empty(0, np.uint8)
        size = self._size
        addresses = _Addresses(len(chunks) * size, self)
        for at, first, count in runs(chunks):
            _map(addresses.start + at * size, count * size, self._fd, first * size)
        _libc().madvise(addresses.start, addresses.nbytes, mmap.MADV_DONTFORK)
        return np.asarray(addresses)


class _Addresses:
    """A reserved range of addresses, without memory at first; keeps `memory` alive."""

    def __init__(self, nbytes: int, memory: CpuMappedMemory) -> None:
        self.nbytes, self._memory = nbytes, memory
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self.start: int = _libc().mmap(None, nbytes, _NO_ACCESS, flags, -1, 0)
        if self.start == _FAILED:
            why = os.strerror(ctypes.get_errno())
            raise OutOfMemoryError(
                f"no room for {exact_bytes(nbytes)} of addresses: {why}; `ulimit -v` "
                "limits them, and the static placement needs fewer"
            )
        end = weakref.finalize(self, _libc().munmap, self.start, nbytes)
        end.atexit = False  # arrays may be read until the process ends

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.start, False),
            "version": 3,
        }


def _map(start: int, nbytes: int, fd: int, offset: int) -> None:
    """Map bytes of a file at reserved addresses, and populate all pages."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | _FIXED | mmap.MAP_POPULATE
    if _libc().mmap(start, nbytes, access, flags, fd, offset) != _FAILED:
        return
    code = ctypes.get_errno()
    if code == errno.ENOMEM:
        raise OutOfMemoryError(
            f"{exact_bytes(nbytes)} cannot be mapped: there is no memory for it, or "
            f"the process has as many mappings as {_MOST} allows"
        )
    raise BackendError(f"mapping {exact_bytes(nbytes)} failed: {os.strerror(code)}")


@functools.cache
def _libc() -> Any:
    """Return the C library with prototypes of the calls that Python lacks."""
    libc = ctypes.CDLL(None, use_errno=True)
    size, number = ctypes.c_size_t, ctypes.c_int
    address = ctypes.c_void_p
    libc.mmap.restype = ctypes.c_size_t
    libc.mmap.argtypes = address, size, number, number, number, ctypes.c_int64
    libc.munmap.argtypes = address, size
    libc.madvise.argtypes = address, size, number
    return libc
