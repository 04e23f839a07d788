"""A GPU without one: arrays with addresses, streams, graphs and a clock by hand."""

import numpy as np

from mucudnn.backends import Backend
from mucudnn.backends.cuda.conv import CudaConv, CudaPlan
from mucudnn.backends.cuda.conv.graph_api import ALIGNMENT
from mucudnn.backends.cuda.descriptors import LiveSession
from mucudnn.backends.cuda.device import CudaDevice, Queue
from mucudnn.errors import OutOfMemoryError
from tests.cudnn_fake import FakeCudnn
from tests.cudnn_kernel import window
from tests.cupy_fake import StrictArray

__all__ = ["FakeArray", "FakeCupy", "FakeDevice", "fake_backend"]


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


class FakeDevice:
    """A device whose clock is the fake library's, and whose stream a test sets."""

    fingerprint = "cuda/fake"

    def __init__(self, library):
        self._library = library
        self._queues = {}
        self.current = 0
        self.most = 1 << 30
        self.captures = 0
        self.graph_launches = 0

    def description(self):
        return {"gpu": "fake"}

    def allocate(self, nbytes):
        if nbytes > self.most:
            raise OutOfMemoryError(f"no room for {nbytes} bytes")
        return FakeArray.of(np.zeros(nbytes, np.uint8))

    def trim(self):
        pass

    def view(self, buffer, offset, spec):
        part = buffer.host[offset : offset + spec.nbytes]
        return FakeArray(part.view(spec.dtype).reshape(spec.shape))

    def dense(self, array, *, copy=False):
        if array.flags.c_contiguous and not copy:
            return array
        return FakeArray.of(array.host)

    overlap = CudaDevice.overlap

    def download(self, source):
        return source.host.copy()

    def randomize(self, array):
        rng = np.random.default_rng(0)
        array.host[...] = rng.uniform(-1, 1, array.shape)

    def queue(self):
        return self._queues.setdefault(self.current, Queue())

    def stream(self):
        return self.current

    def begin(self, launches=1):
        return self._library.clock_ms

    def record(self):
        return self._library.clock_ms

    def elapsed_ms(self, start, stop):
        return stop - start

    def capture(self, launch):
        self.captures += 1
        outer, self.current = self.current, 0xCAFE
        captured = self._library.capturing = []
        try:
            launch()
        finally:
            self._library.capturing, self.current = None, outer

        def replay():
            self.graph_launches += 1
            for work in captured:
                work()

        return replay


class FakeCupy:
    """The module `cupy`, as far as the float32 sums need it: they run on the host."""

    def __init__(self, library):
        self._library = library
        self.launched = []

    def RawKernel(self, source, name, options):  # noqa: N802
        if f"KERNEL {name}(" not in source:
            raise ValueError(name)
        dtype = "float16" if "-DELEMENT=Half" in options else "bfloat16"

        def kernel(blocks, threads, arguments):
            def work():
                self.launched.append((name, dtype, blocks, threads, arguments))
                _sum(dtype, *arguments)

            if self._library.capturing is None:
                work()
            else:
                self._library.capturing.append(work)

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
