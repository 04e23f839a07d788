import gc
import sys
import threading
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.backends.cpu.device import CHUNK, CpuCopier
from mucudnn.backends.cuda.copies import CudaCopier, pinned
from mucudnn.backends.cuda.device import CudaDevice, DescribedDevice
from mucudnn.backends.virtual import VirtualArray, VirtualDevice
from mucudnn.errors import BackendError, BackendUnavailableError, OutOfMemoryError
from tests.cupy_fake import CUDARuntimeError, StrictArray, StrictCupy
from tests.doubles import copied
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
            ticket = copied(copier, "out", device[a], host[b], after)
        else:
            ticket = copied(copier, "back", host[b], device[a], after)
        started.append((ticket, reads, writes))
        expected[writes[0]][writes[1]] = expected[reads[0]][reads[1]]
    copier.finish()
    np.testing.assert_array_equal(device, expected["device"])
    np.testing.assert_array_equal(host, expected["host"])
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
    copied(copier, "out", slow, target)
    assert entered.wait(300)
    fast = np.full(4, 2, np.uint8)
    copier.wait(copied(copier, "back", fast, np.empty(4, np.uint8)))
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
    copier.wait(copied(copier, "out", a, b))
    bad = copied(copier, "out", a, b)
    calls = [
        lambda: copier.wait(bad),
        copier.finish,
        lambda: copied(copier, "out", a, b),
        lambda: copied(copier, "back", b, a),
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
    first = copied(copier, "out", bad, target)
    copied(copier, "out", good, target, [first])
    copied(copier, "back", good, target, [first])
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
    first = copied(copier, "out", buffer, buffer)
    queued = copied(copier, "out", buffer, buffer)
    assert begun.wait(300)
    copier.close()
    assert chunks == [CHUNK]
    for ticket in (first, queued):
        with pytest.raises(BackendError, match="dropped"):
            copier.wait(ticket)
    with pytest.raises(BackendError, match="closed copier"):
        copied(copier, "out", buffer, buffer)


def test_threads_begin_with_the_first_copy_and_end_with_the_copier(copying_threads):
    copier = CpuCopier()
    assert not copying_threads()
    source = np.arange(3 * CHUNK // 8 + 3, dtype=np.float64)
    host, again = np.empty_like(source), np.empty_like(source)
    there = copied(copier, "out", source, host)
    assert len(copying_threads()) == 1
    copier.wait(copied(copier, "back", host, again, [there]))
    assert len(copying_threads()) == 2
    np.testing.assert_array_equal(again, source)
    virtual = VirtualDevice().copier()
    for one, way, a, b in (
        (copier, "out", np.zeros(3, np.float32), np.zeros(4, np.uint8)),
        (virtual, "back", VirtualArray((12,)), VirtualArray((4,))),
    ):
        with pytest.raises(BackendError, match="12 bytes was given 4"):
            copied(one, way, a, b)
    del copier, one  # the fixture waits for the threads


def test_virtual_engines_work_beside_computations():
    device = VirtualDevice()
    device.rates = {"out": Fraction(4), "back": Fraction(8)}
    copier = device.copier()
    large, small = VirtualArray((40,)), VirtualArray((8,))
    device.advance(1)
    first = copied(copier, "out", large, large)
    second = copied(copier, "out", small, small)
    back = copied(copier, "back", small, small)
    late = copied(copier, "back", large, large, [second])
    assert (first, second, back, late) == (11, 13, 2, 18)
    copier.wait(back)
    assert device.now_ms == 2
    device.advance(1)
    copier.wait(back)
    assert device.now_ms == 3
    assert copied(copier, "out", small, small) == 15
    copier.finish()
    assert device.record() == Fraction(18)
    copier.close()
    with pytest.raises(BackendError, match="closed"):
        copied(copier, "out", small, small)


# On a GPU, over the stand-in for CuPy: what is not waited for has not run.


@pytest.fixture
def cupy():
    """All streams run as late as they may, that of the kernels too."""
    made = StrictCupy(lazy=True)
    made.current._lazy = True
    return made


def copier_on(cupy):
    return CudaCopier(cupy, 0, lambda: cupy.current.ptr)


def on_device(nbytes=4):
    return StrictArray(np.zeros(nbytes, np.uint8))


def fails(*_):
    raise CUDARuntimeError("cudaErrorIllegalAddress")


def test_cuda_copies_follow_the_compute_stream_and_are_followed_by_it(cupy):
    copier, launch, seen = copier_on(cupy), cupy.current.put, []
    source, target, host = on_device(), on_device(), np.zeros(4, np.uint8)
    launch(lambda: source.host.fill(1))
    out = copied(copier, "out", source, host)
    back = copied(copier, "back", host, target, [out])
    launch(lambda: seen.append(host[0]))
    cupy.current.synchronize()  # no kernel is held up by a copy
    copier.wait(back)
    launch(lambda: seen.append(target.host[0]))
    assert not host.any()
    cupy.current.synchronize()
    assert seen == [0, 1]
    copier.close()


def test_a_bound_cuda_copy_is_ordered_anew_whenever_it_is_started(cupy):
    """With two events of its own, whoever has waited for it meanwhile."""
    copier, launch, seen = copier_on(cupy), cupy.current.put, []
    source, target, host = on_device(), on_device(), np.zeros(4, np.uint8)
    out = copier.prebind("out", source, host)
    back = copier.prebind("back", host, target)
    for step in range(1, 4):
        launch(lambda n=step: source.host.fill(n))
        came = back([out()])
        # Neither holds up the kernels that follow, nor does the host wait.
        launch(lambda: seen.append(target.host[0]))
        cupy.current.synchronize()
        copier.wait(came)
        launch(lambda: seen.append(target.host[0]))
        assert host[0] == step - 1
        cupy.current.synchronize()
        assert seen[-2:] == [step - 1, step]
    assert len(cupy.events) == 4
    launch(lambda: seen.append("done"))
    copier.finish()  # graphs that were captured copy on the stream that computes
    assert seen[-1] == "done"
    copier.close()
    with pytest.raises(BackendError, match="closed"):
        out()


def test_cuda_failures_are_told_in_our_words(cupy, monkeypatch):
    copier, host = copier_on(cupy), np.empty(4, np.uint8)
    monkeypatch.setattr(cupy.cuda.runtime, "memcpyAsync", fails)
    monkeypatch.setattr(type(cupy.current), "synchronize", fails)
    with pytest.raises(BackendError, match="copy of 4 bytes failed: cudaErrorIllegal"):
        copied(copier, "out", on_device(), host)
    with pytest.raises(BackendError, match="a copy failed"):
        copier.finish()
    copier.close()
    with pytest.raises(BackendError, match="closed"):
        copied(copier, "back", host, on_device())


def test_cuda_host_memory_is_pinned_exactly(cupy, monkeypatch):
    nbytes = 5 * 1024 + 3
    array = pinned(cupy, nbytes)
    array[:] = 7
    ((start, stop),) = cupy.pinned
    assert (array.ctypes.data, array.nbytes, array.dtype) == (start, nbytes, np.uint8)
    assert stop - start == nbytes
    assert pinned(cupy, 0).nbytes == 0
    monkeypatch.setattr(cupy.cuda, "PinnedMemory", fails)
    with pytest.raises(OutOfMemoryError, match="pinned memory: cudaErrorIllegal"):
        pinned(cupy, 1)


def test_a_cuda_device_copies_after_its_current_stream(cupy, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    device = CudaDevice(0, 91900)
    hosts, copier = [device.host(5000) for _ in range(2)], device.copier()
    assert len(cupy.pinned) == 2
    sources = [on_device(5000) for _ in hosts]
    for number, (source, host) in enumerate(zip(sources, hosts, strict=True), 1):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.put(lambda n=number, array=source: array.host.fill(n))
            copied(copier, "out", source, host)
    copier.finish()
    assert [set(host) for host in hosts] == [{1}, {2}]


def test_a_described_device_copies_nothing():
    device = DescribedDevice('{"deviceName": "H"}', 91900)
    for call in (device.copier, lambda: device.host(1)):
        with pytest.raises(BackendUnavailableError, match="without a device"):
            call()
