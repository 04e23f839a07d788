"""A GPU by CuPy, of which there is a stand-in here with two devices."""

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from mucudnn.backends import cuda
from mucudnn.backends.cuda.descriptors import LiveSession
from mucudnn.backends.cuda.device import CudaDevice
from mucudnn.errors import BackendError, OutOfMemoryError
from mucudnn.ir.tensor import TensorSpec
from tests.cudnn_fake import FakeCudnn


class CUDARuntimeError(RuntimeError):
    """As CuPy calls it."""


class NoRoomError(MemoryError):
    """CuPy's own: no relation of ours."""


class Cupy:
    """As much of CuPy as a device uses; what is launched says on which device."""

    def __init__(self):
        self._here = threading.local()
        self.launched = []
        self.most = 1 << 20
        self.capture_fails = False
        self.entered = 0
        self.random = SimpleNamespace(default_rng=self._rng)
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                CUDARuntimeError=CUDARuntimeError,
                getDevice=lambda: self.current,
                getDeviceProperties=lambda i: {
                    "name": b"Stand-in",
                    "major": 9,
                    "minor": 0,
                },
            ),
            memory=SimpleNamespace(OutOfMemoryError=NoRoomError),
            Device=lambda index: Device(self, index),
            Stream=lambda **options: Stream(self),
            Event=lambda: SimpleNamespace(
                record=lambda: self.launched.append(("event", self.current))
            ),
            get_current_stream=lambda index=-1: SimpleNamespace(
                ptr=self.entered or 100 + index
            ),
        )

    @property
    def current(self):
        return getattr(self._here, "device", 0)

    @current.setter
    def current(self, index):
        self._here.device = index

    def empty(self, nbytes, dtype):
        if nbytes > self.most:
            raise NoRoomError(f"{nbytes} bytes on device {self.current}")
        return np.empty(nbytes, dtype)

    def ascontiguousarray(self, array):
        self.empty(array.nbytes, "uint8")
        return np.ascontiguousarray(array)

    def RawKernel(self, source, name):  # noqa: N802
        return lambda *arguments: self.launched.append((name, self.current))

    def _rng(self, seed):
        real = np.random.default_rng(seed)

        def random(size, dtype):
            self.empty(4 * size, "uint8")
            return real.random(size, dtype=dtype)

        return SimpleNamespace(random=random)


class Device:
    def __init__(self, cupy, index):
        self._cupy, self._index = cupy, index

    def use(self):
        self._cupy.current = self._index

    def __enter__(self):
        self._outer, self._cupy.current = self._cupy.current, self._index

    def __exit__(self, *error):
        self._cupy.current = self._outer


class Stream:
    def __init__(self, cupy):
        self._cupy = cupy

    def __enter__(self):
        self._cupy.entered = 900
        return self

    def __exit__(self, *error):
        self._cupy.entered = 0

    def begin_capture(self):
        self._cupy.launched.append("begin")

    def end_capture(self):
        self._cupy.launched.append("end")
        if self._cupy.capture_fails:
            raise CUDARuntimeError("capture invalidated")
        return SimpleNamespace(
            launch=lambda stream: self._cupy.launched.append("graph")
        )


@pytest.fixture
def cupy(monkeypatch):
    stand_in = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    return stand_in


def test_a_new_thread_works_on_the_backends_device(cupy):
    device = CudaDevice(1, 91900)
    library = FakeCudnn()
    created = []
    session = LiveSession(library, device.stream)
    create = library.new

    def new(kind, out):
        created.append((kind, cupy.current))
        create(kind, out)

    library.new = new

    def body():
        device.begin()
        session.handle()

    for _ in range(2):
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
    assert cupy.launched == [("spin", 1), ("event", 1)] * 2
    assert created == [("handle", 1)] * 2
    assert cupy.current == 0


def test_a_timed_run_is_held_back_as_long_as_it_takes_to_launch(cupy, monkeypatch):
    waits = []
    monkeypatch.setattr(
        cupy, "RawKernel", lambda *_: lambda grid, block, given: waits.extend(given)
    )
    device = CudaDevice(0, 91900)
    device.begin()
    device.begin(8)
    assert waits == [40_000, 320_000]


def test_a_gpu_for_one_process_is_measured_in_it(caplog):
    asked = []

    def mode_of(attribute, index):
        asked.append((attribute, index))
        return index

    runtime = SimpleNamespace(deviceGetAttribute=mode_of)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    assert cuda._may_be_shared(cupy, 0)
    assert caplog.text == ""
    assert not cuda._may_be_shared(cupy, 3)
    assert "exclusive-process mode" in caplog.text
    assert asked == [(20, 0), (20, 3)]


def test_too_little_memory_is_our_error_wherever_it_is_found(cupy):
    device = CudaDevice(1, 91900)
    cupy.most = 100
    with pytest.raises(OutOfMemoryError, match=r"no room for 101 bytes: .* device 1"):
        device.allocate(101)
    with pytest.raises(OutOfMemoryError, match="no room for random numbers"):
        device.randomize(np.empty(200, np.float32))
    with pytest.raises(OutOfMemoryError, match="packed copy of 400 bytes"):
        device.dense(np.empty((10, 10), np.float32).T)
    packed = np.zeros(25, np.float32)
    assert device.dense(packed) is packed
    copy = device.dense(packed, copy=True)
    assert copy is not packed
    assert np.array_equal(copy, packed)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "uint16"])
def test_random_numbers_are_in_range(dtype, cupy):
    array = np.empty((7, 11), dtype)
    CudaDevice(0, 91900).randomize(array)
    if dtype == "uint16":  # the upper halves of float32
        array = (array.astype(np.uint32) << 16).view(np.float32)
    assert np.abs(array).max() <= 1
    assert array.std() > 0.4
    assert array.min() < 0 < array.max()


def test_a_view_is_a_window(cupy):
    device = CudaDevice(0, 91900)
    buffer = np.arange(64, dtype=np.uint8)
    view = device.view(buffer, 16, TensorSpec("x", (2, 3), "float32"))
    assert view.shape == (2, 3)
    assert view.tobytes() == bytes(range(16, 40))


def test_a_capture_is_ended_whatever_happens(cupy):
    device = CudaDevice(0, 91900)
    replay = device.capture(lambda: cupy.launched.append("work"))
    replay()
    assert cupy.launched == ["begin", "work", "end", "graph"]
    cupy.launched.clear()
    streams = []
    device.capture(lambda: streams.append(device.stream()))
    assert streams == [900]
    assert device.stream() == 100
    cupy.launched.clear()

    def fails():
        raise BackendError("no")

    with pytest.raises(BackendError, match="no"):
        device.capture(fails)
    cupy.capture_fails = True
    with pytest.raises(BackendError, match="cannot be captured: capture invalidated"):
        device.capture(fails)
    assert cupy.launched == ["begin", "end"] * 2


def test_a_stream_is_a_queue(cupy):
    device = CudaDevice(1, 91900)
    assert device.queue() is device.queue()
    assert device.stream() == 101


def test_what_measurements_depend_on_is_in_the_fingerprint(cupy):
    name = CudaDevice(0, 91900).fingerprint
    assert name.startswith("cuda/Stand-in/sm_90/cudnn-9.19.0/mucudnn-")
    assert CudaDevice(0, 92800).fingerprint != name
