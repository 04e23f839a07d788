"""Device memory mapped at several addresses, by the driver's virtual memory management.

Chunks are allocated once, with one handle each, because a mapping starts at the
beginning of a handle. Address ranges are reserved, mapped and made accessible before
any work uses them. A chunk may be mapped at several addresses: data written by one
launch or copy is visible at all of them to later ones (CUDA C++ Programming Guide,
"Virtual aliasing support"), and an executor orders all work that shares bytes.

The driver maps immediately, regardless of pending work on its streams. So ranges are
unmapped only after synchronizing the device, and never during a capture.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mucudnn.backends.device import check_chunks
from mucudnn.errors import BackendError, OutOfMemoryError, UnsupportedError
from mucudnn.ir.sizes import exact_bytes

_NO_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class CudaMapper:
    """A mapper of device memory in the smallest chunks of the device: 2 MiB."""

    def __init__(self, index: int, stream: Callable[[], int]) -> None:
        self._index, self._stream = index, stream

    @functools.cached_property
    def chunk_bytes(self) -> int:
        """Granularity of the device in bytes; UnsupportedError if it has none."""
        driver = self._driver
        self._stream()
        attribute = driver.CUdevice_attribute
        can = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        (known,) = _check_status(
            driver.cuDeviceGetAttribute(can, self._index), "asking"
        )
        if not known:
            raise UnsupportedError(
                f"GPU {self._index} cannot map its memory; use the static placement"
            )
        least = driver.CUmemAllocationGranularity_flags
        least = least.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        asked = driver.cuMemGetAllocationGranularity(self._kind(), least)
        (nbytes,) = _check_status(asked, "asking for the granularity")
        return int(nbytes)

    def allocate(self, chunks: int) -> "CudaMappedMemory":
        """Allocate chunks, with one handle each."""
        size, driver = self.chunk_bytes, self._driver
        self._stream()
        found = CudaMappedMemory(driver, self._index, size, self._stream)
        for done in range(chunks):
            what = f"{exact_bytes(chunks * size)}, of which {exact_bytes(done * size)}"
            (handle,) = _check_status(
                driver.cuMemCreate(size, self._kind(), 0), f"allocating {what} were had"
            )
            found.handles.append(handle)
        return found

    def _kind(self) -> Any:
        """Return the properties of device memory, as `cuMemCreate` takes them."""
        driver = self._driver
        kind = driver.CUmemAllocationProp()
        kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        kind.location.id = self._index
        return kind

    @functools.cached_property
    def _driver(self) -> Any:
        try:
            from cuda.bindings import driver
        except ImportError as e:
            raise UnsupportedError(
                "mapping device memory needs the driver's bindings, which are not "
                "installed: pip install '.[cuda13]' (or [cuda12] for a CUDA 12 "
                "driver)"
            ) from e
        return driver


class CudaMappedMemory:
    """Chunks of one device; freed with the last buffer over them."""

    def __init__(
        self, driver: Any, index: int, chunk_bytes: int, stream: Callable[[], int]
    ) -> None:
        self.handles: list[Any] = []
        self._driver, self._index = driver, index
        self._size, self._stream = chunk_bytes, stream
        weakref.finalize(self, _release, driver, self.handles).atexit = False

    def map(self, chunks: Sequence[int]) -> Any:
        """Return a CuPy array of bytes over contiguous addresses."""
        import cupy

        check_chunks(chunks, len(self.handles))
        if not chunks:
            return cupy.empty(0, "uint8")
        self._stream()
        if cupy.cuda.get_current_stream().is_capturing():
            raise BackendError("memory cannot be mapped while a graph is captured")
        driver, size, mapped = self._driver, self._size, 0
        nbytes = len(chunks) * size
        reserved = driver.cuMemAddressReserve(nbytes, size, 0, 0)
        what = f"reserving {exact_bytes(nbytes)} of addresses"
        start = int(_check_status(reserved, what)[0])

        def free() -> None:
            # Synchronizes first; goes on even if the device is lost.
            driver.cuCtxSynchronize()
            if mapped:
                driver.cuMemUnmap(start, mapped)
            driver.cuMemAddressFree(start, nbytes)

        owner = _Owner(self)
        weakref.finalize(owner, free).atexit = False
        for chunk in chunks:
            done = driver.cuMemMap(start + mapped, size, 0, self.handles[chunk], 0)
            _check_status(done, "mapping a chunk")
            mapped += size
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        opened = driver.cuMemSetAccess(start, nbytes, [access], 1)
        _check_status(opened, "making mapped memory accessible")
        memory = cupy.cuda.UnownedMemory(start, nbytes, owner, self._index)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray((nbytes,), "uint8", memptr=pointer)


class _Owner:
    """An address range in use; keeps its memory alive."""

    def __init__(self, memory: CudaMappedMemory) -> None:
        self._memory = memory


def _release(driver: Any, handles: Sequence[Any]) -> None:
    for handle in handles:
        driver.cuMemRelease(handle)


def _check_status(answer: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """Return the results of a driver call without its status."""
    status, *found = answer
    if int(status) == _NO_MEMORY:
        raise OutOfMemoryError(f"no room: {what} failed ({status})")
    if int(status):
        raise BackendError(f"{what} failed: {status}")
    return tuple(found)
