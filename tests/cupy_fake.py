"""As much of CuPy as the cuda backend uses, on the host, and as strict as CuPy.

Arrays refuse implicit conversion to NumPy's, and fresh memory is NaN. Kernels are what
the backend's sources become by a C++ compiler (`cuda_emulator.h`), half types included.
The stream that computes runs at once. A stream of copies runs at once too, or lazily:
as late as its waits allow, so that a missing wait gives wrong numbers in one of them.
"""

import ctypes
import itertools
import math
import re
import sys
import threading
from types import SimpleNamespace

import numpy as np

from mucudnn.backends.cuda.kernels import bind
from mucudnn.backends.cuda.kernels.launch import CupyLauncher
from tests.cuda_emulator import GOOD, WRONG, compiled
from tests.cupy_capture import CAPTURED, Captured, CUDARuntimeError

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_PTX = {  # what a C++ compiler knows by another name
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));': (
        "{ _Float16 half = value; __builtin_memcpy(&bits, &half, 2); }"
    ),
    'asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));': (
        "{ _Float16 half; __builtin_memcpy(&half, &bits, 2); value = half; }"
    ),
}
_HOST = r"""
static inline float __uint_as_float(unsigned bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}
"""


def put(work):
    """Run it, or put it into the graph that is being captured."""
    if CAPTURED:
        CAPTURED[-1].append(work)
    else:
        work()


def refuse_capturing(what):
    """CUDA would end the capture."""
    if CAPTURED:
        raise CUDARuntimeError(f"{what} while a stream is captured")


class StrictArray:
    """A `cupy.ndarray`: typed, strided, and opaque to NumPy."""

    __array_priority__ = 100

    def __init__(self, host):
        self.host = host
        self.shape, self.dtype, self.size = host.shape, host.dtype, host.size
        self.nbytes, self.ndim, self.strides = host.nbytes, host.ndim, host.strides
        self.data = SimpleNamespace(ptr=host.ctypes.data if host.size else 0)
        self.flags = SimpleNamespace(c_contiguous=host.flags.c_contiguous)

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __getitem__(self, key):
        return StrictArray(self.host[key])

    def __setitem__(self, key, value):
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        given = value.host if isinstance(value, StrictArray) else value

        def work():
            self.host[key] = given

        put(work)

    def view(self, dtype):
        return StrictArray(self.host.view(dtype))

    def reshape(self, *shape):
        found = self.host.reshape(*shape)
        assert not found.size or np.shares_memory(found, self.host), "it was copied"
        return StrictArray(found)

    def __mul__(self, other):
        return StrictArray(self.host * np.float32(other))

    def __sub__(self, other):
        return StrictArray(self.host - np.float32(other))

    def __rshift__(self, bits):
        return StrictArray(self.host >> bits)

    @property
    def T(self):  # noqa: N802
        return StrictArray(self.host.T)

    def __lshift__(self, bits):
        return StrictArray(self.host << bits)

    def astype(self, dtype):
        return StrictArray(self.host.astype(dtype))

    def copy(self):
        refuse_capturing("an allocation")
        return StrictArray(self.host.copy())

    def get(self):
        refuse_capturing("a copy to the host")
        return self.host.copy()

    def set(self, arr):
        refuse_capturing("a copy from the host")
        if not isinstance(arr, np.ndarray):
            raise TypeError(f"only NumPy's arrays can be set, not {type(arr)}")
        if (self.dtype, self.shape) != (arr.dtype, arr.shape):
            raise TypeError(f"{arr.dtype}{arr.shape} in {self.dtype}{self.shape}")
        if not self.flags.c_contiguous:
            raise RuntimeError("cannot set an array with gaps")
        self.host[...] = arr


class _Stream:
    """Work in order; `queue` holds what has not run yet."""

    def __init__(self, cupy, ptr, lazy):
        self._cupy, self.ptr, self._lazy = cupy, ptr, lazy
        self.queue, self.begun = [], 0

    def put(self, work):
        self.queue.append(work)
        if not self._lazy:
            self.drain(self.end)

    @property
    def end(self):
        return self.begun + len(self.queue)

    def drain(self, position):
        while self.begun < position:
            self.begun += 1
            self.queue.pop(0)()

    def synchronize(self):
        refuse_capturing("a wait of the host")
        self.drain(self.end)

    def __enter__(self):
        self._outer, self._cupy.current = self._cupy.current, self
        return self

    def __exit__(self, *_):
        self._cupy.current = self._outer

    def begin_capture(self):
        CAPTURED.append(Captured(self.ptr))

    def end_capture(self):
        graph = CAPTURED.pop()
        graph.end()
        self._cupy.captured.append(graph)
        return SimpleNamespace(launch=lambda stream: self._cupy.replay(graph))

    def wait_event(self, event):
        self._cupy.wait(self.ptr, event.ptr)


class _Event:
    def __init__(self, cupy, ptr):
        self._cupy, self.ptr = cupy, ptr

    @property
    def done(self):
        stream, position = self._cupy.events[self.ptr]
        return stream.begun >= position

    def record(self):
        self._cupy.timed.append(("event", self._cupy.device))

    def synchronize(self):
        refuse_capturing("a wait of the host")
        stream, position = self._cupy.recorded(self.ptr)
        stream.drain(position)


class _Device:
    """Which one a thread works on; all have the same memory and streams."""

    def __init__(self, cupy, index):
        self._cupy, self._index = cupy, cupy.device if index is None else index

    def use(self):
        self._cupy.device = self._index

    def __enter__(self):
        self._outer, self._cupy.device = self._cupy.device, self._index

    def __exit__(self, *_):
        self._cupy.device = self._outer


class NoRoomError(MemoryError):
    """CuPy's own."""


class StrictCupy:
    """The module `cupy`.

    Args:
        lazy: Whether copies run as late as they may.
    """

    __version__ = "14.0.0"

    def __init__(self, *, lazy=False):
        self._lazy = lazy
        self._numbers, self._libraries = itertools.count(1), {}
        self.events, self.launched = {}, []
        self.captured, self.replayed, self.pinned = [], 0, []
        self.timed = []  # what timing launches: (name, device)
        self.most = math.inf  # bytes that there is room for at once
        self._here = threading.local()
        self._null = _Stream(self, 0, lazy=False)
        self._streams = {0: self._null}
        self.current = self._null
        self.random = SimpleNamespace(default_rng=self._rng)
        runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            getDevice=lambda: getattr(self._here, "device", 0),
            getDeviceProperties=lambda device: {
                "name": b"Strict",
                "major": 9,
                "minor": 0,
            },
            driverGetVersion=lambda: 13000,
            runtimeGetVersion=lambda: 13000,
            memcpyDeviceToDevice=3,
            memcpyDeviceToHost=2,
            memcpyHostToDevice=1,
            memcpyDefault=4,
            getDeviceCount=lambda: 2,
            deviceCanAccessPeer=lambda device, peerDevice: device != peerDevice,
            deviceEnablePeerAccess=lambda peerDevice: None,
            eventRecord=self._record,
            streamWaitEvent=self.wait,
            streamSynchronize=lambda stream: self._streams[stream].synchronize(),
            memcpyAsync=self._copy,
        )
        self.cuda = SimpleNamespace(
            runtime=runtime,
            Device=lambda device=None: _Device(self, device),
            Event=self._event,
            Stream=self._stream,
            get_current_stream=lambda device_id=-1: self.current,
            get_elapsed_time=lambda start_event, end_event: 0.01,
            PinnedMemory=lambda size, flags=0: np.ones(size),
            PinnedMemoryPointer=self._locked,
            memory=SimpleNamespace(OutOfMemoryError=NoRoomError),
        )

    @property
    def device(self):
        return getattr(self._here, "device", 0)

    @device.setter
    def device(self, index):
        self._here.device = index

    def _take(self, nbytes):
        if nbytes > self.most:
            raise NoRoomError(f"{nbytes} bytes on device {self.device}")

    def get_default_memory_pool(self):
        return SimpleNamespace(free_all_blocks=lambda: None)

    def replay(self, graph):
        """Launch a graph, on the stream that computes."""
        assert not CAPTURED
        assert self.current is self._null
        self.replayed += 1
        graph.replay(lambda at_once: _Stream(self, 0, self._lazy and not at_once))

    def empty(self, shape, dtype):
        refuse_capturing("an allocation")
        self._take(shape)
        room = np.full(shape + 512, 0xFF, np.uint8)  # NaN of every float
        start = -room.ctypes.data % 512
        return StrictArray(room[start : start + shape].view(dtype))

    def ascontiguousarray(self, a):
        refuse_capturing("an allocation")
        self._take(a.nbytes)
        return StrictArray(np.ascontiguousarray(a.host))

    def asnumpy(self, a):
        return a.get()

    def matmul(self, a, b, out):
        """Sums in float32 at least, as cuBLAS is asked to."""
        assert a.dtype == b.dtype == out.dtype
        assert out.dtype.name in _FLOATS, f"Invalid dtype: {out.dtype}"
        assert out.flags.c_contiguous
        wide = np.promote_types(np.float32, out.dtype)

        def work():
            out.host[...] = np.matmul(a.host.astype(wide), b.host.astype(wide))

        put(work)

    def RawKernel(self, code, name, options=()):  # noqa: N802
        if not isinstance(options, tuple):
            raise TypeError(f"options are a tuple, not {options!r}")
        return lambda grid, block, args: self._launch(
            code, name, options, grid, block, args
        )

    def _launch(self, source, name, options, grid, block, arguments):
        if not (isinstance(grid, tuple) and isinstance(block, tuple)):
            raise TypeError(f"grids and blocks are tuples, not {grid!r} and {block!r}")
        if name == "spin":
            self.timed.append((name, self.device))
            return
        passed = [
            ctypes.c_uint64(a.data.ptr)
            if isinstance(a, StrictArray)
            else ctypes.create_string_buffer(a.tobytes(), a.itemsize)
            for a in arguments
        ]
        addresses = (ctypes.c_void_p * len(passed))(*map(ctypes.addressof, passed))
        x, y = (*grid, 1)[:2]
        library, fibers = self._library(source, options), "__syncthreads" in source

        def work(kept=passed):
            outcome = library[f"run_{name}"](x, y, addresses, fibers, False)
            assert outcome == GOOD, f"{name}: {WRONG[outcome]}"
            self.launched.append(name)

        put(work)

    def _library(self, source, options):
        key = source, options
        if key not in self._libraries:
            refuse_capturing("the loading of a kernel")
            self._libraries[key] = self._built(source, options)
        return self._libraries[key]

    def _built(self, source, options):
        for ptx, host in _PTX.items():
            source = source.replace(ptx, host)
        kernels = re.findall(r"^KERNEL (\w+)\(", source, re.MULTILINE)
        return compiled(f"{_HOST}{source}", kernels, options)

    def _rng(self, seed=None):
        real = np.random.default_rng(seed)

        def random(size, dtype):
            self._take(4 * size)
            return StrictArray(real.random(size, dtype))

        return SimpleNamespace(random=random)

    def _event(self, block=False, disable_timing=False):
        ptr = next(self._numbers)
        self.events[ptr] = self._null, 0
        return _Event(self, ptr)

    def _stream(self, null=False, non_blocking=False):
        made = _Stream(self, 0x1000 + next(self._numbers), self._lazy)
        self._streams[made.ptr] = made
        return made

    def _record(self, event, stream):
        _whole(event, stream)
        if CAPTURED and CAPTURED[-1].record(event, stream):
            self.events[event] = None
            return
        made = self._streams[stream]
        self.events[event] = made, made.end

    def recorded(self, event):
        """Stream and position of an event."""
        if self.events[event] is None:
            raise CUDARuntimeError("cudaErrorCapturedEvent")
        return self.events[event]

    def wait(self, stream, event):
        _whole(stream, event)
        if CAPTURED and CAPTURED[-1].wait(stream, event):
            return
        recorded, position = self.recorded(event)
        self._streams[stream].put(lambda: recorded.drain(position))

    def _copy(self, dst, src, size, kind, stream):
        _whole(dst, src, size, kind, stream)

        def work():
            ctypes.memmove(dst, src, size)

        if not CAPTURED or not CAPTURED[-1].put(stream, work):
            self._streams[stream].put(work)
            return
        host = {1: src, 2: dst}.get(kind)
        if host is not None and not any(
            start <= host and host + size <= stop for start, stop in self.pinned
        ):
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: pageable memory")

    def _locked(self, mem, offset):
        found = mem.astype(np.uint8)
        start = found.ctypes.data
        self.pinned.append((start, start + found.nbytes))
        return found


def on_cupy(monkeypatch, **options):
    """The module, imported in place of CuPy, and our kernels on it."""
    cupy = StrictCupy(**options)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy, bind(CupyLauncher(lambda: None))


def _whole(*values):
    """Functions in C take no number of NumPy's for an address."""
    for value in values:
        if type(value) is not int:
            raise TypeError(f"an integer is required, not {value!r}")
