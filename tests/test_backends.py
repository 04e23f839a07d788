"""Backends by name, and what a device is."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.backends import Backend, backend_names, device_count, get_backend
from mucudnn.backends.cpu.device import ALIGNMENT
from mucudnn.backends.cuda.device import CudaDevice
from mucudnn.errors import (
    BackendError,
    BackendUnavailableError,
    OutOfMemoryError,
    StepFailedError,
    UnsupportedError,
)
from mucudnn.ir.conv import AlgoPerf, ConvPlan
from mucudnn.ir.tensor import TensorSpec
from tests.commands import python
from tests.doubles import arrays, plan_of, problem


def test_an_unknown_name_lists_the_valid_ones():
    with pytest.raises(ValueError, match="unknown backend 'gpu'") as caught:
        get_backend("gpu")
    for name in backend_names():
        assert name in str(caught.value)
    assert {"cpu", "null", "recorded"} <= set(backend_names())


def test_a_gpu_is_not_named_by_its_number():
    with pytest.raises(BackendUnavailableError, match="CUDA_VISIBLE_DEVICES=1, and"):
        get_backend("cuda:1")


def test_a_gpu_that_cannot_be_used_is_told_with_what_can(monkeypatch):
    """Whichever command was asked: few take a description of a device."""

    def fails():
        raise RuntimeError("cudaErrorInsufficientDriver")

    runtime = SimpleNamespace(CUDARuntimeError=RuntimeError, getDeviceCount=fails)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    told = "cudaErrorInsufficientDriver; the backend 'cpu' computes anywhere, and "
    with pytest.raises(BackendUnavailableError, match=f"{told}`mucudnn tune"):
        get_backend("cuda")


@pytest.mark.parametrize("name", ["cpu", "null"])
def test_device_numbers(name):
    count = device_count(name)
    for device in (0, count - 1):
        assert get_backend(name, device).name == name
    for device in (-1, count):
        with pytest.raises(ValueError, match=f"devices 0 to {count - 1}, not {device}"):
            get_backend(name, device)


def test_a_backend_is_its_parts_and_describes_its_device_in_words(backend):
    assert isinstance(backend, Backend)
    device = backend.device
    assert device.fingerprint.split("/")[0] == backend.name
    assert device.fingerprint == get_backend(backend.name).device.fingerprint
    described = device.description()
    words = [*described.keys(), *described.values()]
    assert all(type(word) is str and word for word in words)
    if backend.name == "cpu":
        assert {"processor", "cores", "numpy", "blas"} <= described.keys()
        assert int(described["cores"]) >= 1
        assert described["processor"] in device.fingerprint


def test_every_algorithm_runs_in_the_workspace_it_asks_for(backend):
    for batch in (1, 3):
        micro = problem(batch)
        specs = micro.operands()
        device = backend.device
        a, b, out = (device.view(device.allocate(s.nbytes), 0, s) for s in specs)
        for array in (a, b, out):
            device.randomize(array)
        for algo, nbytes in backend.conv.algorithms(micro):
            start = device.record()
            backend.conv.run(micro, algo, a, b, out, device.allocate(nbytes))
            assert device.elapsed_ms(start, device.record()) > 0
            if nbytes:
                with pytest.raises(BackendError, match=f"needs {nbytes} bytes"):
                    backend.conv.run(
                        micro, algo, a, b, out, device.allocate(nbytes - 1)
                    )
        with pytest.raises(UnsupportedError, match="no algorithm 'MAGIC'"):
            backend.conv.run(micro, "MAGIC", a, b, out, None)


@given(st.lists(st.floats(0, 1e6), max_size=20), st.floats(0, 1e9))
def test_a_virtual_clock_is_exact_at_any_time_of_day(times, offset):
    device = get_backend("null").device
    device.advance(offset)
    for ms in times:
        start = device.record()
        device.advance(ms)
        assert device.elapsed_ms(start, device.record()) == ms


@given(st.integers(0, 30).flatmap(lambda n: st.tuples(st.just(n), st.slices(n))))
def test_virtual_slices_are_as_long_as_real_ones(case):
    length, window = case
    array = get_backend("null").device.view(None, 0, TensorSpec("x", (length, 3)))
    assert array[window].shape == (len(range(length)[window]), 3)
    assert array.nbytes == 12 * length


@given(st.integers(0, 100_000))
def test_cpu_memory_is_aligned_and_of_the_size_asked_and_views_share_it(nbytes):
    device = get_backend("cpu").device
    buffer = device.allocate(nbytes + 64)
    assert buffer.nbytes == nbytes + 64
    assert buffer.ctypes.data % ALIGNMENT == 0
    view = device.view(buffer, 64, TensorSpec("x", (nbytes // 12, 3)))
    view[...] = 1
    assert view.shape == (nbytes // 12, 3)
    ones = np.ones(nbytes // 12 * 3, np.float32)
    assert bytes(buffer[64 : 64 + view.nbytes]) == ones.tobytes()
    more = nbytes + (1 << 60)
    with pytest.raises(OutOfMemoryError, match=f"no room for {more} bytes"):
        device.allocate(more)


@given(st.permutations(range(3)), st.sampled_from([1, 2, -1]))
def test_cpu_dense_copies_only_what_is_not(axes, step):
    device = get_backend("cpu").device
    array = np.arange(120.0).reshape(4, 5, 6).transpose(axes)[::step]
    dense = device.dense(array)
    assert dense.flags.c_contiguous
    assert np.array_equal(dense, array)
    assert (dense is array) == array.flags.c_contiguous


@given(*[st.integers(0, 12)] * 4)
def test_overlap_is_exact_and_a_copy_has_none(start, stop, other, end):
    device = get_backend("cpu").device
    memory = np.arange(12.0)
    one, two = memory[start:stop], memory[other:end]
    assert device.overlap(one, two) == np.shares_memory(one, two)
    assert not device.overlap(device.dense(one, copy=True), one)
    assert not CudaDevice.overlap(device, Pointed(one), Pointed(one.copy()))
    expected = np.shares_memory(one, two)
    assert CudaDevice.overlap(device, Pointed(one), Pointed(two)) == expected


class Pointed:
    """An array as CuPy shows it: by address and size."""

    def __init__(self, host):
        self.data = SimpleNamespace(ptr=host.ctypes.data)
        self.nbytes = host.nbytes


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_cpu_random_numbers_are_ordinary(cpu, dtype):
    array = np.full((30, 20), np.nan, dtype)
    cpu.device.randomize(array)
    assert array.min() < -0.5
    assert array.max() > 0.5
    assert (np.abs(array) <= 1).all()


def test_a_refused_kernel_is_refused_in_its_turn(backend):
    """Binding refuses nothing: what comes before it is done, and by whom is told."""
    known, nbytes = min(backend.conv.algorithms(problem(2)), key=lambda pair: pair[1])
    steps = ((known, 2, nbytes), ("MAGIC", 1, 0), (known, 2, nbytes))
    rows = (AlgoPerf(algo=a, batch=n, time_ms=1.0, workspace=w) for a, n, w in steps)
    runner = backend.bind(ConvPlan(problem(5), tuple(rows)))
    device = backend.device
    specs = problem(5).operands()
    operands = [device.view(device.allocate(s.nbytes), 0, s) for s in specs]
    for operand in operands:
        device.randomize(operand)
    workspace = device.allocate(nbytes)
    for _ in range(2):
        with pytest.raises(StepFailedError, match="no algorithm 'MAGIC'") as caught:
            runner.run(*operands, workspace, False)
        assert (caught.value.algo, caught.value.done) == ("MAGIC", 2)


def test_bound_plans_move_a_virtual_clock_as_their_kernels_do(null):
    whole = problem(8)
    plan = plan_of(null, whole, ("FAST", 5), ("SLOW", 3))
    runner, workspace = null.bind(plan), null.device.allocate(plan.workspace)
    assert runner.plan is plan
    runner.run(*arrays(whole), workspace, False)
    assert null.device.now_ms == pytest.approx(5 * 0.4 + 3 * 1.0 + 2 * 0.1)
    assert get_backend("null", 1).device.now_ms == 0  # a clock of its own
    with pytest.raises(StepFailedError, match=f"needs {5 << 10} bytes.*got 7"):
        runner.run(*arrays(whole), null.device.allocate(7), False)


def test_a_blas_that_another_package_loads_is_not_numpys():
    """SciPy brings one of its own: the CPU is called the same with it as without."""
    pytest.importorskip("scipy")
    code = (
        "from mucudnn.backends.cpu.device import CpuDevice\n"
        "before = CpuDevice().fingerprint\n"
        "import scipy.linalg\n"
        "assert CpuDevice().fingerprint == before, before\n"
    )
    python("-c", code)
