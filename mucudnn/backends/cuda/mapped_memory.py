"""Device memory under several addresses, by the driver's virtual memory management.

Chunks are allocated once, one handle each: a mapping begins at the beginning of a
handle. Rows of addresses are reserved, mapped and made accessible before anything runs
over them. A chunk may be behind several addresses: what one launch or copy wrote is
seen under all of them by those that come after it (CUDA C++ Programming Guide, "Virtual
aliasing support"), and an executor orders whatever shares bytes.

The driver maps as soon as it is called, whatever its streams still have to do, so that
addresses are taken back only when the device is at rest; and never during a capture.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.errors import BackendError, OutOfMemoryError, UnsupportedError
from mucudnn.ir.sizes import exact_bytes

__all__ = ["CudaMapper"]

_NO_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class CudaMapper:
    """Device memory in chunks as small as the device has them: 2 MiB.

    Args:
        index: Which GPU.
        stream: Makes it the calling thread's own.
    """

    def __init__(self, index: int, stream: Callable[[], int]) -> None:
        self._index, self._stream = index, stream

    @functools.cached_property
    def chunk_bytes(self) -> int:
        """The device's granularity.

        Raises:
            UnsupportedError: The driver's bindings are missing, or the device is too
                old.
        """
        driver = self._driver
        self._stream()
        attribute = driver.CUdevice_attribute
        can = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        (known,) = _done(driver.cuDeviceGetAttribute(can, self._index), "asking")
        if not known:
            raise UnsupportedError(
                f"GPU {self._index} cannot map its memory; use the static placement"
            )
        least = driver.CUmemAllocationGranularity_flags
        least = least.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        asked = driver.cuMemGetAllocationGranularity(self._kind(), least)
        (nbytes,) = _done(asked, "asking for the granularity")
        return int(nbytes)

    def allocate(self, chunks: int) -> "CudaMappedMemory":
        """So many chunks, a handle each."""
        size, driver = self.chunk_bytes, self._driver
        self._stream()
        found = CudaMappedMemory(driver, self._index, size, self._stream)
        for done in range(chunks):
            what = f"{exact_bytes(chunks * size)}, of which {exact_bytes(done * size)}"
            (handle,) = _done(
                driver.cuMemCreate(size, self._kind(), 0),
                f"allocating {what} were had",
            )
            found.handles.append(handle)
        return found

    def _kind(self) -> Any:
        """Memory of the device, as `cuMemCreate` has it described."""
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
                "installed: pip install 'mucudnn[cuda13]' (or [cuda12] for a CUDA 12 "
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
        """A CuPy array of bytes over a row of addresses."""
        import cupy

        strange = [c for c in chunks if not 0 <= c < len(self.handles)]
        if strange:
            raise ValueError(
                f"chunk {strange[0]} of {len(self.handles)} cannot be mapped; they are "
                "counted from 0"
            )
        if not chunks:
            return cupy.empty(0, "uint8")
        self._stream()
        if cupy.cuda.get_current_stream().is_capturing():
            raise BackendError("memory cannot be mapped while a graph is captured")
        owner = _Addresses(self, self._reserved(len(chunks) * self._size))
        for chunk in chunks:
            owner.row.map(self.handles[chunk], self._size)
        owner.row.open(self._index)
        memory = cupy.cuda.UnownedMemory(
            owner.row.start, owner.row.nbytes, owner, self._index
        )
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray((owner.row.nbytes,), "uint8", memptr=pointer)

    def _reserved(self, nbytes: int) -> "_Row":
        reserve = self._driver.cuMemAddressReserve
        what = f"reserving {exact_bytes(nbytes)} of addresses"
        (start,) = _done(reserve(nbytes, self._size, 0, 0), what)
        return _Row(self._driver, int(start), nbytes)


@dataclass(slots=True)
class _Row:
    """Reserved addresses, and how many of them have memory behind them."""

    driver: Any
    start: int
    nbytes: int
    mapped: int = 0

    def map(self, handle: Any, nbytes: int) -> None:
        """Put a chunk behind the next of them."""
        at = self.start + self.mapped
        _done(self.driver.cuMemMap(at, nbytes, 0, handle, 0), "mapping a chunk")
        self.mapped += nbytes

    def open(self, index: int) -> None:
        """Let a device read and write all of them."""
        driver = self.driver
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = index
        flags = driver.CUmemAccess_flags
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        opened = driver.cuMemSetAccess(self.start, self.nbytes, [access], 1)
        _done(opened, "making mapped memory accessible")

    def give_back(self) -> None:
        """Take memory and addresses apart, once the device is at rest.

        A device that is lost has no memory to give back: no status is looked at.
        """
        self.driver.cuCtxSynchronize()
        if self.mapped:
            self.driver.cuMemUnmap(self.start, self.mapped)
        self.driver.cuMemAddressFree(self.start, self.nbytes)


class _Addresses:
    """A row in use, and the memory that is kept with it."""

    def __init__(self, memory: CudaMappedMemory, row: _Row) -> None:
        self.row, self._memory = row, memory
        weakref.finalize(self, row.give_back).atexit = False


def _release(driver: Any, handles: Sequence[Any]) -> None:
    for handle in handles:
        driver.cuMemRelease(handle)


def _done(answer: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """What a call returned beside its status.

    Raises:
        OutOfMemoryError: There is no room.
        BackendError: Another status.
    """
    status, *found = answer
    if int(status) == _NO_MEMORY:
        raise OutOfMemoryError(f"no room: {what} failed ({status})")
    if int(status):
        raise BackendError(f"{what} failed: {status}")
    return tuple(found)
