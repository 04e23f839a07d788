import gc
import sys
import threading
import time
import weakref
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.backends.cpu.device import CHUNK, CpuCopier
from mucudnn.backends.cuda.copies import CudaCopier, pinned
from mucudnn.backends.cuda.device import CudaDevice, DescribedDevice
from mucudnn.backends.virtual import VirtualArray, VirtualDevice
from mucudnn.errors import BackendError, BackendUnavailableError, OutOfMemoryError
from tests.examples import examples


@pytest.fixture(autouse=True)
def no_threads_left(copying_threads):
    yield
    deadline = time.monotonic() + 300
    while copying_threads() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.001)
    assert not copying_threads()


OPERATION = st.tuples(st.sampled_from(["out", "back"]), *[st.integers(0, 3)] * 2)


@given(st.lists(OPERATION, max_size=12), st.booleans())
@examples(40)
def test_copies_that_wait_for_conflicting_ones_equal_a_sequence(operations, large):
    size = CHUNK + 5 if large and len(operations) < 4 else 7
    rng = np.random.default_rng(0)
    device = rng.integers(256, size=(4, size), dtype=np.uint8)
    host = rng.integers(256, size=(4, size), dtype=np.uint8)
    expected = {"device": device.copy(), "host": host.copy()}
    copier = CpuCopier()
    started = []
    for way, a, b in operations:
        reads, writes = ("device", a), ("host", b)
        if way == "back":
            reads, writes = writes, reads
        after = [
            ticket
            for ticket, read, written in started
            if written in (reads, writes) or read == writes
        ]
        if way == "out":
            ticket = copier.out(device[a], host[b], after)
        else:
            ticket = copier.back(host[b], device[a], after)
        started.append((ticket, reads, writes))
        expected[writes[0]][writes[1]] = expected[reads[0]][reads[1]]
    copier.finish()
    np.testing.assert_array_equal(device, expected["device"])
    np.testing.assert_array_equal(host, expected["host"])
    copier.close()


def test_a_copy_is_there_when_it_has_been_waited_for():
    copier = CpuCopier()
    source = np.arange(3 * CHUNK // 8 + 3, dtype=np.float64)
    host, again = np.empty_like(source), np.empty_like(source)
    there = copier.out(source, host)
    back = copier.back(host, again, [there])
    copier.wait(back)
    np.testing.assert_array_equal(again, source)
    copier.close()


def test_a_copy_does_not_hold_up_the_other_direction():
    entered, release = threading.Event(), threading.Event()

    def copy(source, target):
        if source[0] == 1:
            entered.set()
            release.wait(300)
        target[...] = source

    copier = CpuCopier(copy)
    slow, target = np.ones(4, np.uint8), np.zeros(4, np.uint8)
    copier.out(slow, target)
    assert entered.wait(300)
    fast = np.full(4, 2, np.uint8)
    copier.wait(copier.back(fast, np.empty(4, np.uint8)))
    assert not target.any()
    release.set()
    copier.finish()
    assert target.all()
    copier.close()


def failing(after):
    count = 0

    def copy(source, target):
        nonlocal count
        count += 1
        if count > after:
            raise OSError(5, "the link is down")
        target[...] = source

    return copy


def test_the_first_failure_is_told_by_every_later_call():
    copier = CpuCopier(failing(1))
    a, b = np.zeros(4, np.uint8), np.ones(4, np.uint8)
    copier.wait(copier.out(a, b))
    bad = copier.out(a, b)
    calls = [
        lambda: copier.wait(bad),
        copier.finish,
        lambda: copier.out(a, b),
        lambda: copier.back(b, a),
        lambda: copier.wait(bad),
    ]
    for call in calls:
        with pytest.raises(BackendError, match=r"to the host .*link is down") as e:
            call()
        assert isinstance(e.value.__cause__, OSError)
    copier.close()
    copier.close()


def test_copies_after_a_failed_one_are_not_made():
    release = threading.Event()

    def copy(source, target):
        release.wait(300)
        if source[0] == 0:
            raise ValueError("no")
        target[...] = source

    copier = CpuCopier(copy)
    bad, good = np.zeros(4, np.uint8), np.ones(4, np.uint8)
    target = np.zeros(4, np.uint8)
    first = copier.out(bad, target)
    copier.out(good, target, [first])
    copier.back(good, target, [first])
    release.set()
    with pytest.raises(BackendError, match="no"):
        copier.finish()
    assert not target.any()
    copier.close()


def test_closing_stops_in_the_middle_of_a_copy():
    chunks = []
    begun = threading.Event()

    def copy(source, target):
        chunks.append(source.size)
        begun.set()
        copier._state.stopped.wait(300)

    copier = CpuCopier(copy)
    buffer = np.empty(20 * CHUNK, np.uint8)
    first = copier.out(buffer, buffer)
    queued = copier.out(buffer, buffer)
    assert begun.wait(300)
    copier.close()
    assert chunks == [CHUNK]
    for ticket in (first, queued):
        with pytest.raises(BackendError, match="dropped"):
            copier.wait(ticket)
    with pytest.raises(BackendError, match="closed copier"):
        copier.out(buffer, buffer)


def test_threads_begin_with_the_first_copy_and_end_with_the_copier(copying_threads):
    copier = CpuCopier()
    assert not copying_threads()
    a = np.zeros(4, np.uint8)
    copier.wait(copier.out(a, a.copy()))
    assert len(copying_threads()) == 1
    copier.wait(copier.back(a, a.copy()))
    assert len(copying_threads()) == 2
    del copier  # the fixture waits for the threads


def test_sizes_must_agree():
    copier = CpuCopier()
    with pytest.raises(BackendError, match="12 bytes was given 4"):
        copier.out(np.zeros(3, np.float32), np.zeros(4, np.uint8))
    virtual = VirtualDevice().copier()
    with pytest.raises(BackendError, match="12 bytes was given 4"):
        virtual.back(VirtualArray((12,)), VirtualArray((4,)))


def test_virtual_engines_work_beside_computations():
    device = VirtualDevice(out_bytes_per_ms=4, in_bytes_per_ms=8)
    copier = device.copier()
    large, small = VirtualArray((40,)), VirtualArray((8,))
    device.advance(1)
    first = copier.out(large, large)
    second = copier.out(small, small)
    back = copier.back(small, small)
    late = copier.back(large, large, [second])
    assert (first, second, back, late) == (11, 13, 2, 18)
    copier.wait(back)
    assert device.now_ms == 2
    device.advance(1)
    copier.wait(back)
    assert device.now_ms == 3
    assert copier.out(small, small) == 15
    copier.finish()
    assert device.record() == Fraction(18)
    copier.close()
    with pytest.raises(BackendError, match="closed"):
        copier.out(small, small)


class FakeRuntime:
    """CUDA's order of things: what every stream knows to be done."""

    memcpyDeviceToHost, memcpyHostToDevice = 2, 1  # noqa: N815

    class CUDARuntimeError(Exception):
        pass

    def __init__(self):
        self.known = {}
        self.events = {}
        self.calls = []
        self.waited = []
        self.broken = False

    def launch(self, stream, name):
        before = self.known.setdefault(stream, frozenset())
        self.known[stream] = before | {name}
        return before

    def eventRecord(self, event, stream):  # noqa: N802
        self.events[event] = self.known.setdefault(stream, frozenset())

    def streamWaitEvent(self, stream, event):  # noqa: N802
        self.known[stream] = self.known.get(stream, frozenset()) | self.events[event]

    def streamSynchronize(self, stream):  # noqa: N802
        self.waited.append(stream)

    def memcpyAsync(self, target, source, nbytes, kind, stream):  # noqa: N802
        if self.broken:
            raise self.CUDARuntimeError("cudaErrorIllegalAddress")
        name = f"copy {len(self.calls)}"
        self.calls.append((target, source, nbytes, kind, stream))
        self.calls[-1] += (self.launch(stream, name),)


class FakeCupyStreams:
    """The part of `cupy` that copies use."""

    def __init__(self):
        self.runtime = FakeRuntime()
        self.made = {"stream": 0, "event": 0}
        self.pinned = []
        self.room = 1 << 20
        self.idle = True
        self.cuda = SimpleNamespace(
            runtime=self.runtime,
            Device=self._device,
            Stream=self._stream,
            Event=self._event,
            PinnedMemory=self._pinned_memory,
            PinnedMemoryPointer=lambda memory, offset: memory,
        )

    def _device(self, index):
        return threading.Lock()

    def _stream(self, non_blocking):
        assert non_blocking
        self.made["stream"] += 1
        ptr = 100 + self.made["stream"]
        return SimpleNamespace(
            ptr=ptr,
            wait_event=lambda event: self.runtime.streamWaitEvent(ptr, event.ptr),
            synchronize=self._synchronize,
        )

    def _synchronize(self):
        if self.runtime.broken:
            raise FakeRuntime.CUDARuntimeError("cudaErrorIllegalAddress")

    def _event(self, disable_timing):
        assert disable_timing
        self.made["event"] += 1
        return SimpleNamespace(ptr=1000 + self.made["event"], done=self.idle)

    def _pinned_memory(self, nbytes):
        if nbytes > self.room:
            raise FakeRuntime.CUDARuntimeError("cudaErrorMemoryAllocation")
        self.pinned.append(nbytes)
        return bytearray(nbytes)


class DeviceArray:
    """The part of a CuPy array that copies use."""

    def __init__(self, address, nbytes):
        self.data = SimpleNamespace(ptr=address)
        self.nbytes = nbytes


@pytest.fixture
def fake():
    return FakeCupyStreams()


def test_cuda_copies_follow_the_compute_stream_and_are_followed_by_it(fake):
    runtime, stream = fake.runtime, 7
    copier = CudaCopier(fake, 0, lambda: stream)
    host = np.empty(64, np.uint8)
    runtime.launch(stream, "kernel 0")
    out = copier.out(DeviceArray(4096, 64), host)
    runtime.launch(stream, "kernel 1")
    back = copier.back(host, DeviceArray(8192, 64), [out])
    first, second = runtime.calls
    assert first[:4] == (host.ctypes.data, 4096, 64, FakeRuntime.memcpyDeviceToHost)
    assert second[:4] == (8192, host.ctypes.data, 64, FakeRuntime.memcpyHostToDevice)
    assert first[4] != second[4]
    assert stream not in (first[4], second[4])
    assert first[5] == {"kernel 0"}
    assert second[5] == {"kernel 0", "kernel 1", "copy 0"}
    assert runtime.launch(stream, "kernel 2") == {"kernel 0", "kernel 1"}
    copier.wait(back)
    assert {"copy 0", "copy 1"} <= runtime.launch(stream, "kernel 3")
    copier.close()


def test_cuda_copies_follow_whichever_stream_is_current(fake):
    current = [7]
    copier = CudaCopier(fake, 0, lambda: current[0])
    fake.runtime.launch(8, "elsewhere")
    current[0] = 8
    ticket = copier.out(DeviceArray(0, 4), np.empty(4, np.uint8))
    assert fake.runtime.calls[0][5] == {"elsewhere"}
    current[0] = 9
    copier.wait(ticket)
    assert "copy 0" in fake.runtime.launch(9, "kernel")


def test_cuda_events_are_used_again_in_the_next_step(fake):
    copier = CudaCopier(fake, 0, lambda: 0)
    host = np.empty(4, np.uint8)
    for _ in range(3):
        for _ in range(5):
            copier.wait(copier.out(DeviceArray(0, 4), host))
        copier.finish()
    assert fake.made == {"stream": 2, "event": 10}


def test_a_bound_cuda_copy_is_ordered_anew_whenever_it_is_started(fake):
    """With two events of its own, whoever has waited for it meanwhile."""
    runtime, stream = fake.runtime, 7
    copier = CudaCopier(fake, 0, lambda: stream)
    host = np.empty(64, np.uint8)
    out = copier.prebind("out", DeviceArray(4096, 64), host)
    back = copier.prebind("back", host, DeviceArray(8192, 64))
    for step in range(3):
        runtime.launch(stream, f"kernel {step}")
        came = back([out()])
        # Neither holds up the kernels that follow, nor a copy the other direction.
        assert f"copy {2 * step}" not in runtime.launch(stream, f"beside {step}")
        copier.wait(came)
        first, second = runtime.calls[-2:]
        assert f"beside {step}" not in first[5] | second[5]
        assert first[:2] == (host.ctypes.data, 4096)
        assert second[:2] == (8192, host.ctypes.data)
        assert f"kernel {step}" in first[5]
        assert f"copy {2 * step}" in second[5]
        assert f"copy {2 * step + 1}" not in second[5]
        assert f"copy {2 * step + 1}" in runtime.launch(stream, "next")
    assert fake.made == {"stream": 2, "event": 4}
    assert not runtime.waited
    copier.finish()  # graphs that were captured copy on the stream that computes
    assert runtime.waited == [stream]
    copier.close()
    with pytest.raises(BackendError, match="closed"):
        out()


@pytest.mark.parametrize("idle", [True, False])
def test_cuda_copies_that_never_finish_together_are_forgotten_once_done(fake, idle):
    """As where copies reach from step to step; nothing is forgotten before."""
    fake.idle = idle
    copier = CudaCopier(fake, 0, lambda: 0)
    host = np.empty(4, np.uint8)
    held = []
    for _ in range(1000):
        array = DeviceArray(0, 4)
        held.append(weakref.ref(array))
        ticket = copier.out(array, host)
    del array
    alive = sum(ref() is not None for ref in held)
    assert alive == (513 if idle else 1000)
    copier.wait(ticket)
    copier.finish()
    assert not any(ref() for ref in held)


def test_cuda_failures_are_told_in_our_words(fake):
    copier = CudaCopier(fake, 0, lambda: 0)
    host = np.empty(4, np.uint8)
    fake.runtime.broken = True
    with pytest.raises(BackendError, match="copy of 4 bytes failed: cudaErrorIllegal"):
        copier.out(DeviceArray(0, 4), host)
    with pytest.raises(BackendError, match="a copy failed"):
        copier.finish()
    copier.close()
    with pytest.raises(BackendError, match="closed"):
        copier.back(host, DeviceArray(0, 4))


def test_cuda_host_memory_is_pinned_exactly(fake):
    nbytes = 5 * 1024 + 3
    array = pinned(fake, nbytes)
    array[:] = 7
    assert fake.pinned == [nbytes]
    assert array.nbytes == nbytes
    assert array.dtype == np.uint8
    assert pinned(fake, 0).nbytes == 0
    with pytest.raises(OutOfMemoryError, match="pinned memory: cudaErrorMemory"):
        pinned(fake, fake.room + 1)


def test_a_cuda_device_copies_after_its_current_stream(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake)
    streams = [55]
    fake.cuda.get_current_stream = lambda index: SimpleNamespace(ptr=streams[0])
    fake.runtime.getDevice = lambda: 3
    fake.runtime.getDeviceProperties = lambda index: {}
    device = CudaDevice(3, 91900)
    host = device.host(5000)
    assert fake.pinned == [5000]
    copier = device.copier()
    fake.runtime.launch(55, "kernel")
    copier.out(DeviceArray(0, 5000), host)
    streams[0] = 56
    copier.out(DeviceArray(0, 5000), host)
    assert fake.runtime.calls[0][5] == {"kernel"}
    assert fake.runtime.calls[1][5] == {"kernel", "copy 0"}


def test_a_described_device_copies_nothing():
    device = DescribedDevice('{"deviceName": "H"}', 91900)
    for call in (device.copier, lambda: device.host(1)):
        with pytest.raises(BackendUnavailableError, match="without a device"):
            call()
