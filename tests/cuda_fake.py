"""A GPU without one, whose clock is that of the library's stand-in."""

import sys

import numpy as np
import pytest

from mucudnn.backends import Backend
from mucudnn.backends.cuda.conv import CudaConv, CudaPlan
from mucudnn.backends.cuda.conv.graph_api import ALIGNMENT
from mucudnn.backends.cuda.descriptors import LiveSession
from mucudnn.backends.cuda.device import CudaDevice
from tests.cudnn_fake import FakeCudnn
from tests.cudnn_kernel import window
from tests.cupy_fake import StrictArray, StrictCupy, put


class FakeArray(StrictArray):
    """An array whose place in memory a test chooses."""

    @classmethod
    def of(cls, values, offset=0):
        """A copy of `values` that begins `offset` bytes after a multiple of 512."""
        values = np.asarray(values)
        room = np.zeros(values.nbytes + offset + 512, np.uint8)
        start = -room.ctypes.data % 512 + offset
        host = room[start : start + values.nbytes].view(values.dtype)
        host = host.reshape(values.shape)
        host[...] = values
        return cls(host)


class FakeDevice(CudaDevice):
    """The device over the stand-in for CuPy; its clock is the fake library's."""

    def __init__(self, library):
        self._library, self.cupy = library, StrictCupy()
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "cupy", self.cupy)
            super().__init__(0, 91900)

    def begin(self, launches=1):
        return self._library.clock_ms

    def record(self):
        return self._library.clock_ms

    def elapsed_ms(self, start, stop):
        return stop - start


class HostSums:
    """The module `cupy`, as far as the float32 sums need it: they run on the host."""

    def __init__(self):
        self.launched = []

    def RawKernel(self, source, name, options):  # noqa: N802
        if f"KERNEL {name}(" not in source:
            raise ValueError(name)
        dtype = "float16" if "-DELEMENT=Half" in options else "bfloat16"

        def kernel(blocks, threads, arguments):
            def work():
                self.launched.append((name, dtype, blocks, threads, arguments))
                _sum(dtype, *arguments)

            put(work)

        return kernel


def _sum(dtype, part, total, out, count, first, accumulate):
    part, out = (window(int(p), 2 * int(count)).view(dtype) for p in (part, out))
    total = window(int(total), 4 * int(count)).view(np.float32)
    if first:
        total[...] = out if accumulate else 0
    total += part
    out[...] = total


def fake_backend(library=None):
    """The real runtime's parts over a fake library."""
    library = FakeCudnn() if library is None else library
    device = FakeDevice(library)
    conv = CudaConv(LiveSession(library, device.stream))
    return Backend(
        "cuda",
        device,
        conv,
        binder=lambda plan, replay: CudaPlan(
            conv, plan, device.capture if replay else None
        ),
        split_alignment=ALIGNMENT,
        plan_serializer=conv,
    )
