"""A GPU by CuPy, over its stand-in."""

import sys
import threading
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest

from mucudnn.backends import cuda
from mucudnn.backends.cuda.copies import CudaCopier, CudaStepIO
from mucudnn.backends.cuda.descriptors import LiveSession
from mucudnn.backends.cuda.device import CudaDevice
from mucudnn.errors import BackendError, OutOfMemoryError
from mucudnn.ir.optimizers import DynamicLossScale
from mucudnn.ir.schedule import SwapOut
from mucudnn.ir.tensor import TensorSpec
from mucudnn.runtime.training.budget import MemoryBudget
from tests.cuda_emulator import COMPILER
from tests.cudnn_fake import FakeCudnn
from tests.cupy_capture import Captured
from tests.cupy_fake import CAPTURED, CUDARuntimeError, StrictArray, StrictCupy, put
from tests.test_cuda_training import STEPS, stand_in
from tests.training_cases import examples, trainer


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


def test_a_device_has_a_fingerprint_views_and_random_numbers_in_range(cupy):
    device = CudaDevice(0, 91900)
    name = device.fingerprint
    assert name.startswith("cuda/Strict/sm_90/cudnn-9.19.0/mucudnn-")
    assert CudaDevice(0, 92800).fingerprint != name
    buffer = StrictArray(np.arange(64, dtype=np.uint8))
    view = device.view(buffer, 16, TensorSpec("x", (2, 3), "float32"))
    assert view.shape == (2, 3)
    assert view.host.tobytes() == bytes(range(16, 40))
    for dtype in ("float16", "float32", "float64"):
        array = np.empty((7, 11), dtype)
        device.randomize(StrictArray(array))
        assert np.abs(array).max() <= 1
        assert array.std() > 0.4
        assert array.min() < 0 < array.max()


emulated = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")


@pytest.fixture(
    params=[(lazy, staged) for lazy in (False, True) for staged in (True, False)],
    ids=lambda p: f"copies {'late' if p[0] else 'early'}{', staged' * p[1]}",
)
def device(request):
    """CuPy's stand-in that computes late, and a step_io on it."""
    lazy, staged = request.param
    cupy = StrictCupy(lazy=lazy)
    cupy.current._lazy = True
    return cupy, CudaStepIO(cupy, 0, lambda: cupy.current.ptr, staged=staged)


def values(number):
    return np.full((3, 2), number, np.float32)


def test_every_step_reads_its_own_input(device):
    """However far the host is ahead, and whatever it does with its array afterwards."""
    cupy, step_io = device
    target, read = cupy.empty(24, "uint8").view("float32").reshape(3, 2), []
    source = values(0)
    for number in range(6):
        source[...] = number
        step_io.upload(source, target)
        cupy.current.put(lambda: read.append(target.host.copy()))
    source[...] = 99
    cupy.current.synchronize()
    assert [set(found.flat) for found in read] == [{float(n)} for n in range(6)]


def test_results_are_those_of_their_step_whenever_they_are_read(device):
    cupy, step_io = device
    source = StrictArray(values(0))
    found = []
    for number in range(5):
        cupy.current.put(lambda n=number: source.host.fill(n))
        found.append(step_io.download(source))
    cupy.current.put(lambda: source.host.fill(99))
    assert [set(result().flat) for result in found] == [{float(n)} for n in range(5)]
    assert all(result.ready for result in found)
    again = found[0]()
    assert again is found[0]()


def test_nothing_is_waited_for_before_it_is_read(device):
    cupy, step_io = device
    source, target = StrictArray(values(0)), StrictArray(values(0))
    cupy.current.put(lambda: source.host.fill(1))
    step_io.upload(values(2), target)
    result = step_io.download(source)
    assert not result.ready
    assert cupy.current.queue
    assert (result() == 1).all()
    assert result.ready
    result = step_io.download(target)
    step_io.close()
    assert (result() == 2).all()


def test_what_cuda_refuses_is_our_error(device, monkeypatch):
    cupy, step_io = device

    def fails(*_):
        raise CUDARuntimeError("cudaErrorIllegalAddress")

    target = StrictArray(values(0))
    unstaged = CudaStepIO(cupy, 0, lambda: cupy.current.ptr, staged=False)
    with monkeypatch.context() as patch:  # its input takes no place on the device
        patch.setattr(cupy, "empty", None)
        unstaged.upload(values(1), target)
        cupy.current.synchronize()
    assert (target.host == 1).all()
    monkeypatch.setattr(cupy.cuda.runtime, "memcpyAsync", fails)
    with pytest.raises(BackendError, match="24 bytes to the device failed"):
        step_io.upload(values(1), target)
    with pytest.raises(BackendError, match="to the host failed"):
        step_io.download(target)


def trained(monkeypatch, *, late, **more):
    """A trainer, its losses and states, and whose copies the host has waited for."""
    images, labels = examples(6 * STEPS)
    rows = [slice(6 * i, 6 * i + 6) for i in range(STEPS)]
    waits, results, finish = [], [], CudaCopier.finish
    _, gpu = stand_in(monkeypatch, lazy=True)
    made = trainer(6, backend=gpu, evaluate=False, **more)
    with monkeypatch.context() as patch:
        patch.setattr(
            CudaCopier, "finish", lambda copier: (waits.append(copier), finish(copier))
        )
        for number, part in enumerate(rows):
            if number == 1:
                waits.clear()  # what is live across steps was fetched once
            results.append(made.step(images[part], labels[part]))
            if not late:
                assert np.isfinite(results[-1].loss)
    state = made.state.save()  # before anybody has read a late loss
    return made, [(r.loss, r.correct) for r in results], state, waits


@cache
def trained_in_all_memory(**more):
    with pytest.MonkeyPatch.context() as patch:
        made, found, state, _ = trained(patch, late=False, **more)
    return made.peak_bytes, found, state


def no_wait_within(monkeypatch, share, budget=MemoryBudget, **more):
    """Train in a share of the memory; all bits are those of training in all of it."""
    peak_bytes, expected, state = trained_in_all_memory(**more)
    more["budget"] = budget(nbytes=int(peak_bytes * share), convolutions="fixed")
    made, found, after, waits = trained(monkeypatch, late=True, **more)
    assert not waits
    assert made.peak_bytes <= more["budget"].nbytes
    copied = [i for i in made.placed.schedule.instructions if type(i) is SwapOut]
    assert bool(copied) == (share < 1)
    assert found == expected
    assert all(np.array_equal(v, after[n]) for n, v in state.items())
    return made


@emulated
@pytest.mark.parametrize("precision", [None, "float16"])
@pytest.mark.parametrize("share", [0.7, 1.5])
def test_within_a_budget_the_host_waits_for_no_step(share, precision, monkeypatch):
    """Copies of what left are waited for by the stream that computes."""
    no_wait_within(monkeypatch, share, precision=precision)


@emulated
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the stand-in
def test_the_host_decides_nothing_where_updates_may_be_skipped(monkeypatch):
    """The first steps overflow: the device lowers its scale and updates nothing."""
    scaling = DynamicLossScale(2.0**30, backoff=2.0**-10)
    more = {"precision": "float16", "loss_scale": scaling}
    made = no_wait_within(monkeypatch, 0.8, **more)
    assert made.loss_scale == 2.0**10


@emulated
@pytest.mark.parametrize("away", ["disk", "peer:1"])
def test_wherever_it_goes_the_host_waits_for_no_step(away, monkeypatch, tmp_path):
    """But within a copy to memory that is not page-locked, as CUDA does."""
    tiers = f"disk:{tmp_path}" if away == "disk" else away
    budget = partial(MemoryBudget, tiers=tiers)
    no_wait_within(monkeypatch, 0.8, budget, precision=None)


@emulated
@pytest.mark.parametrize("parts", [1, 3])
def test_losses_read_late_are_those_read_at_once(parts, monkeypatch):
    """A step is launched while the loss of the one before has not been read."""
    _, early, *_ = trained(monkeypatch, late=False, parts=parts)
    made, late, *_ = trained(monkeypatch, late=True, parts=parts)
    assert late == early
    assert made.step_ms > 0
