"""The driver's virtual memory management, on the host, and as strict as the driver.

Memory is really mapped, from one file without a name, and addresses without access end
the process. Sizes and offsets are those of whole chunks, what is mapped is reserved and
free, what is unmapped was mapped, what is released is mapped nowhere, and nothing of it
happens while a stream captures. `installed` adds to the stand-in for CuPy what gets at
such memory.
"""

import ctypes
import mmap
import os
from types import SimpleNamespace

import numpy as np

from tests.cupy_fake import StrictArray

OK, INVALID, NO_ROOM = 0, 1, 2
FIXED = 0x10

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_size_t
libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
)
libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class StrictDriver:
    """The module `cuda.bindings.driver`.

    Args:
        chunk: Bytes of a chunk.
        room: Bytes of the device.
    """

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102
    )
    CUmemAllocationGranularity_flags = SimpleNamespace(
        CU_MEM_ALLOC_GRANULARITY_MINIMUM=0
    )
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self, chunk=2 << 20, room=1 << 30):
        self.chunk, self._room = chunk, room
        self._fd = os.memfd_create("device")
        os.ftruncate(self._fd, room)
        self._free = list(range(0, room, chunk))
        self.handles = {}  # handle -> where it is in the file
        self.reserved = {}  # first address -> bytes
        self.mapped = {}  # address of a chunk -> handle
        self.open = set()  # addresses of chunks that may be read and written
        self.capturing = self.supported = False
        self.supported = True
        self.calls = []
        self.wrong = []

    def __del__(self):
        os.close(self._fd)

    @staticmethod
    def CUmemAllocationProp():  # noqa: N802
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None))

    @staticmethod
    def CUmemAccessDesc():  # noqa: N802
        return SimpleNamespace(flags=None, location=SimpleNamespace(type=None, id=None))

    def cuDeviceGetAttribute(self, attribute, device):  # noqa: N802
        assert (attribute, device) == (102, 0)
        return OK, int(self.supported)

    def cuMemGetAllocationGranularity(self, prop, flags):  # noqa: N802
        assert flags == 0
        return (OK, self.chunk) if self._device(prop) else (INVALID, 0)

    def cuMemCreate(self, size, prop, flags):  # noqa: N802
        self._say("create", size > 0 and size % self.chunk == 0 and flags == 0)
        if not self._device(prop):
            return INVALID, None
        if size > self.chunk or not self._free:
            return NO_ROOM, None
        place = self._free.pop()
        handle = place + 1
        self.handles[handle] = place
        return OK, handle

    def cuMemRelease(self, handle):  # noqa: N802
        mapped = handle in self.mapped.values()
        self._say("release", handle in self.handles and not mapped)
        self._free.append(self.handles.pop(handle))
        return (OK,)

    def cuMemAddressReserve(self, size, alignment, address, flags):  # noqa: N802
        fine = size % self.chunk == 0 and alignment % self.chunk == 0
        self._say("reserve", fine and size > 0 and not address and not flags)
        start = libc.mmap(None, size + self.chunk, 0, 0x4022, -1, 0)
        start += -start % self.chunk
        self.reserved[start] = size
        return OK, start

    def cuMemAddressFree(self, start, size):  # noqa: N802
        row = range(start, start + size, self.chunk)
        fine = self.reserved.pop(start, None) == size
        self._say("free", fine and not any(at in self.mapped for at in row))
        libc.munmap(start, size)
        return (OK,)

    def cuMemMap(self, start, size, offset, handle, flags):  # noqa: N802
        within = any(
            a <= start and start + size <= a + n for a, n in self.reserved.items()
        )
        fine = start % self.chunk == 0 and size == self.chunk
        fine = fine and offset == flags == 0 and handle in self.handles
        self._say("map", fine and within and start not in self.mapped)
        self.mapped[start] = handle
        flags = mmap.MAP_SHARED | FIXED
        libc.mmap(start, size, 0, flags, self._fd, self.handles[handle])
        return (OK,)

    def cuMemSetAccess(self, start, size, access, count):  # noqa: N802
        row = range(start, start + size, self.chunk)
        (one,) = access
        fine = count == 1 and one.flags == 3 and self._device(one, kind=None)
        self._say("access", fine and all(at in self.mapped for at in row))
        self.open.update(row)
        libc.mprotect(start, size, mmap.PROT_READ | mmap.PROT_WRITE)
        return (OK,)

    def cuMemUnmap(self, start, size):  # noqa: N802
        row = range(start, start + size, self.chunk)
        rested = self.calls[-1:] == ["synchronize"]
        self._say("unmap", rested and all(at in self.mapped for at in row))
        for at in row:
            del self.mapped[at]
            self.open.discard(at)
        libc.mprotect(start, size, 0)
        return (OK,)

    def cuCtxSynchronize(self):  # noqa: N802
        self.calls.append("synchronize")
        return (OK,)

    def accessible(self, start, size):
        """Whether every byte may be read and written."""
        first = start - start % self.chunk
        return all(at in self.open for at in range(first, start + size, self.chunk))

    def _device(self, described, kind=1):
        fine = (described.location.type, described.location.id) == (1, 0)
        return fine and (kind is None or described.type == kind)

    def _say(self, call, fine):
        """Note a call; one that the driver would refuse, or worse, is remembered."""
        if self.capturing or not fine:
            self.wrong.append(call)
        self.calls.append(call)
        assert fine, f"{call} is wrong"
        assert not self.capturing, f"{call} during a capture"


def installed(cupy, driver):
    """The stand-in for CuPy, with arrays over memory that others own."""

    def unowned(start, nbytes, owner, device):
        assert driver.accessible(start, nbytes), "mapped memory without access"
        assert device == 0
        return SimpleNamespace(ptr=start, nbytes=nbytes, owner=owner)

    def array(shape, dtype, memptr):
        memory, offset = memptr
        (nbytes,) = shape
        assert (dtype, offset, nbytes) == ("uint8", 0, memory.nbytes)
        raw = (ctypes.c_uint8 * nbytes).from_address(memory.ptr)
        raw.owner = memory.owner
        return StrictArray(np.frombuffer(raw, np.uint8))

    cupy.cuda.UnownedMemory = unowned
    cupy.cuda.MemoryPointer = lambda memory, offset: (memory, offset)
    cupy.ndarray = array
    cupy.cuda.get_current_stream().is_capturing = lambda: driver.capturing
    return cupy
