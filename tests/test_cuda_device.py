"""A GPU by CuPy, over its stand-in."""

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
from tests.cupy_capture import Captured
from tests.cupy_fake import CAPTURED, CUDARuntimeError, StrictArray, StrictCupy, put


@pytest.fixture
def cupy(monkeypatch):
    stand_in = StrictCupy()
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    return stand_in


def test_a_new_thread_works_on_the_backends_device(cupy):
    device = CudaDevice(1, 91900)
    library = FakeCudnn()
    created = []
    session = LiveSession(library, device.stream)
    create = library.new

    def new(kind, out):
        created.append((kind, cupy.device))
        create(kind, out)

    library.new = new

    def body():
        device.begin()
        session.handle()

    for _ in range(2):
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
    assert cupy.timed == [("spin", 1), ("event", 1)] * 2
    assert created == [("handle", 1)] * 2
    assert cupy.device == 0


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
        device.randomize(StrictArray(np.empty(200, np.float32)))
    with pytest.raises(OutOfMemoryError, match="packed copy of 400 bytes"):
        device.dense(StrictArray(np.empty((10, 10), np.float32)).T)
    packed = StrictArray(np.zeros(25, np.float32))
    assert device.dense(packed) is packed
    copy = device.dense(packed, copy=True)
    assert copy is not packed
    assert np.array_equal(copy.host, packed.host)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_random_numbers_are_in_range(dtype, cupy):
    array = np.empty((7, 11), dtype)
    CudaDevice(0, 91900).randomize(StrictArray(array))
    assert np.abs(array).max() <= 1
    assert array.std() > 0.4
    assert array.min() < 0 < array.max()


def test_a_view_is_a_window(cupy):
    device = CudaDevice(0, 91900)
    buffer = StrictArray(np.arange(64, dtype=np.uint8))
    view = device.view(buffer, 16, TensorSpec("x", (2, 3), "float32"))
    assert view.shape == (2, 3)
    assert view.host.tobytes() == bytes(range(16, 40))


def test_a_capture_is_ended_whatever_happens(cupy, monkeypatch):
    device, done = CudaDevice(0, 91900), []
    replay = device.capture(lambda: put(lambda: done.append("work")))
    assert done == []
    replay()
    assert (done, cupy.replayed) == (["work"], 1)
    streams = []
    device.capture(lambda: streams.append(device.stream()))
    assert streams != [device.stream()]

    def fails():
        raise BackendError("no")

    with pytest.raises(BackendError, match="no"):
        device.capture(fails)
    assert CAPTURED == []

    def invalidated(graph):
        raise CUDARuntimeError("capture invalidated")

    monkeypatch.setattr(Captured, "end", invalidated)
    with pytest.raises(BackendError, match="cannot be captured: capture invalidated"):
        device.capture(fails)
    assert CAPTURED == []


def test_a_stream_is_a_queue(cupy, monkeypatch):
    device, asked = CudaDevice(1, 91900), []
    current = cupy.cuda.get_current_stream
    monkeypatch.setattr(
        cupy.cuda, "get_current_stream", lambda at: asked.append(at) or current(at)
    )
    assert device.queue() is device.queue()
    assert device.stream() == current().ptr
    assert asked == [1] * 3


def test_what_measurements_depend_on_is_in_the_fingerprint(cupy):
    name = CudaDevice(0, 91900).fingerprint
    assert name.startswith("cuda/Strict/sm_90/cudnn-9.19.0/mucudnn-")
    assert CudaDevice(0, 92800).fingerprint != name
