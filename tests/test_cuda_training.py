"""Whole networks trained on the cuda backend: over stand-ins here, and on a GPU."""

import importlib.util
import sys
from collections import Counter

import numpy as np
import pytest

from mucudnn.backends import Backend
from mucudnn.backends.cuda.conv import CudaConv, CudaPlan, float32_sum
from mucudnn.backends.cuda.conv.graph_api import ALIGNMENT
from mucudnn.backends.cuda.copies import CudaCopier
from mucudnn.backends.cuda.cudnn_kernels import CudnnKernels
from mucudnn.backends.cuda.descriptors import LiveSession
from mucudnn.backends.cuda.device import CudaDevice
from mucudnn.backends.cuda.kernels import bind
from mucudnn.backends.cuda.kernels.launch import CupyLauncher
from mucudnn.backends.cuda.loading import with_remedy
from mucudnn.errors import BackendError, UnsupportedError
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.optimizers import Adam, DynamicLossScale
from mucudnn.ir.schedule import SwapOut
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.precision import COUNTS
from mucudnn.passes.graph.updates import with_updates
from mucudnn.runtime.executor import Executor
from mucudnn.runtime.executor.tasks import Copies
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.parameters import StateStore
from mucudnn.runtime.training.planned_steps import place_steps
from mucudnn.runtime.tuning.tuner import Tuner
from tests import cudnn_kernel
from tests.cuda_emulator import COMPILER
from tests.cudnn_fake import FakeCudnn
from tests.cupy_fake import StrictArray, StrictCupy
from tests.model_cases import random_feeds
from tests.python_calls import python_calls
from tests.training_cases import examples, trainer

emulated = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")
BFLOAT16 = pytest.param(
    "bfloat16",
    0.05,
    marks=pytest.mark.skipif(
        importlib.util.find_spec("ml_dtypes") is None, reason="needs ml_dtypes"
    ),
)
PRECISIONS = [(None, 1e-5), ("float16", 5e-3), BFLOAT16]
STEPS = 4


def stand_in(monkeypatch, *, lazy=False, kind=StrictCupy):
    monkeypatch.setitem(sys.modules, "cupy", cupy := kind(lazy=lazy))
    # Without a name for bfloat16 the library's stand-in computes something else.
    known = importlib.util.find_spec("ml_dtypes") is not None
    monkeypatch.setitem(cudnn_kernel._NAMES, 9, "bfloat16" if known else "float16")
    float32_sum._kernel.cache_clear()
    device = CudaDevice(0, 91900)
    session = LiveSession(FakeCudnn(), device.stream)
    conv, own = CudaConv(session), CudnnKernels(session)
    return cupy, Backend(
        "cuda",
        device,
        conv,
        binder=lambda plan, replay: CudaPlan(conv, plan, None),
        split_alignment=ALIGNMENT,
        plan_serializer=conv,
        kernels=own.beside(bind(CupyLauncher(device.stream))),
        library_kernels=own,
        capture=device.capture,
        step_io=device.step_io,
    )


def losses(backend, **more):
    """Of a few steps of a network with a convolution and a linear layer."""
    images, labels = examples(8 * STEPS)
    made = trainer(8, backend=backend, evaluate=False, **more)
    rows = [slice(8 * i, 8 * i + 8) for i in range(STEPS)]
    found = [float(made.step(images[r], labels[r]).loss) for r in rows]
    return np.array(found), made


@emulated
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "lazy"), [("NCHW", False), ("NCHW", True), ("NHWC", True)]
)
@pytest.mark.parametrize(("precision", "apart"), PRECISIONS)
def test_training_agrees_with_the_cpus(precision, apart, layout, lazy, monkeypatch):
    expected, _ = losses("cpu")
    cupy, gpu = stand_in(monkeypatch, lazy=lazy)
    more = {"precision": precision, "layout": layout}
    found, free = losses(gpu, **more)
    assert np.abs(found - expected).max() < apart
    assert "momentum_all" in cupy.launched
    if layout == "NHWC":
        assert {"transpose", "transpose_few"} & {*cupy.launched}
    # With tensors on the host for a while, every bit is the same.
    budget = MemoryBudget(nbytes=int(free.peak_bytes * 0.7), convolutions="fixed")
    again, _ = losses(gpu, **more, budget=budget)
    assert np.array_equal(again, found)


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_a_dynamic_loss_scale_on_the_device(parts, monkeypatch):
    """Updates are one launch a step; what overflows is skipped as on the CPU."""
    more = {"loss_scale": DynamicLossScale(2.0**14, interval=2), "parts": parts}
    expected, cpu = losses("cpu", **more)
    cupy, gpu = stand_in(monkeypatch)
    found, free = losses(gpu, **more)
    assert np.abs(found - expected).max() < 1e-5
    assert free.loss_scale == cpu.loss_scale == 2.0**16
    names = Counter(cupy.launched)
    assert names["momentum_all"] == names["find_overflow_all"] == STEPS
    assert names["momentum"] == names["find_overflow"] == 0
    budget = MemoryBudget(nbytes=int(free.peak_bytes * 0.7), convolutions="fixed")
    again, _ = losses(gpu, budget=budget, **more)
    assert np.array_equal(again, found)


@emulated
@pytest.mark.parametrize(
    ("more", "graphs"),
    [
        ({}, 1),
        ({"loss_scale": DynamicLossScale(2.0**14, interval=2)}, 1),
        ({"parts": 2}, 2),
    ],
)
def test_a_replayed_step_is_one_launch_with_the_same_bits(more, graphs, monkeypatch):
    """Rates, masks and scales are those of each step, not of the one captured."""
    more |= {
        "options": {"dropout": 0.3},
        "learning_rate": lambda step: 0.1 / (1 + step),
    }
    _, gpu = stand_in(monkeypatch)
    expected, free = losses(gpu, **more)
    cupy, gpu = stand_in(monkeypatch)
    found, made = losses(gpu, replay=True, **more)
    assert np.array_equal(found, expected)
    assert len(cupy.captured) == graphs
    assert cupy.replayed == (STEPS - 1) * graphs
    for name, value in free.state.save().items():
        assert np.array_equal(made.state.save()[name], value), name


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("lazy", [False, True])
def test_between_copies_that_reach_into_the_next_step_it_is_replayed(lazy, monkeypatch):
    _, gpu = stand_in(monkeypatch)
    expected, free = losses(gpu)
    budget = MemoryBudget(nbytes=int(free.peak_bytes * 0.7), convolutions="fixed")
    cupy, gpu = stand_in(monkeypatch, lazy=lazy)
    found, made = losses(gpu, replay=True, budget=budget)
    assert made.placed.schedule.live_across
    assert np.array_equal(found, expected)
    assert len(cupy.captured) > 0
    assert cupy.replayed == (STEPS - 1) * len(cupy.captured)


@emulated
@pytest.mark.parametrize("lazy", [False, True])
def test_a_step_with_copies_is_one_graph(lazy, monkeypatch):
    """All that leaves is back by its end, so copies are captured with the kernels."""
    _, gpu = stand_in(monkeypatch)
    expected, free = losses(gpu)
    budget = MemoryBudget(nbytes=int(free.peak_bytes * 0.8), convolutions="fixed")
    cupy, gpu = stand_in(monkeypatch, lazy=lazy)
    found, made = losses(gpu, replay=True, budget=budget)
    schedule = made.placed.schedule
    assert any(type(i) is SwapOut for i in schedule.instructions)
    assert not schedule.live_across
    assert np.array_equal(found, expected)
    assert (len(cupy.captured), cupy.replayed) == (1, STEPS - 1)
    waited, finish = [], CudaCopier.finish
    monkeypatch.setattr(
        CudaCopier, "finish", lambda copier: (waited.append(copier), finish(copier))
    )
    for name, value in free.state.save().items():
        assert np.array_equal(made.state.save()[name], value), name
    assert waited


@emulated
def test_copies_to_a_file_are_not_captured(monkeypatch, tmp_path, caplog):
    """A graph for what is between them instead."""
    _, gpu = stand_in(monkeypatch)
    expected, free = losses(gpu)
    nbytes = int(free.peak_bytes * 0.8)
    budget = MemoryBudget(nbytes=nbytes, convolutions="fixed", disk=tmp_path)
    cupy, gpu = stand_in(monkeypatch, lazy=True)
    found, _ = losses(gpu, replay=True, budget=budget)
    assert not caplog.text  # it was not tried
    assert np.array_equal(found, expected)
    assert len(cupy.captured) > 1
    assert cupy.replayed == (STEPS - 1) * len(cupy.captured)


@emulated
def test_what_cannot_be_captured_is_launched_call_by_call(monkeypatch, caplog):
    _, gpu = stand_in(monkeypatch)
    expected, _ = losses(gpu)
    cupy, gpu = stand_in(monkeypatch)
    exactly = cupy.matmul

    def packs(a, b, out):
        exactly(cupy.ascontiguousarray(a), b, out)  # allocates: CUDA ends a capture

    monkeypatch.setattr(cupy, "matmul", packs)
    found, _ = losses(gpu, replay=True)
    assert np.array_equal(found, expected)
    assert cupy.replayed == 0
    assert "the step is not replayed: " in caplog.text


@emulated
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the stand-in
def test_half_precision_skips_what_overflows(monkeypatch):
    _, gpu = stand_in(monkeypatch)
    scaling = DynamicLossScale(2.0**30, backoff=2.0**-10)
    _, made = losses(gpu, precision="float16", loss_scale=scaling)
    assert made.loss_scale == 2.0**10
    assert made.state.save([COUNTS])[COUNTS].tolist() == [0, 2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "apart"), PRECISIONS)
def test_training_on_a_gpu_agrees_with_the_cpus(precision, apart, cuda):
    expected, _ = losses("cpu")
    found, _ = losses(cuda, precision=precision)
    assert np.abs(found - expected).max() < max(apart, 5e-3)  # TF32


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.7, 1.5])
@pytest.mark.parametrize("precision", [None, "float16"])
def test_training_within_a_budget_on_a_gpu_agrees(precision, share, cuda):
    """Losses are read when all steps are launched, state before them."""
    expected, free = losses(cuda, precision=precision)
    images, labels = examples(8 * STEPS)
    budget = MemoryBudget(nbytes=int(free.peak_bytes * share), convolutions="fixed")
    made = trainer(8, backend=cuda, evaluate=False, precision=precision, budget=budget)
    rows = [slice(8 * i, 8 * i + 8) for i in range(STEPS)]
    results = [made.step(images[r], labels[r]) for r in rows]
    saved, apart = made.state.save(), 5e-3 if precision is None else 2e-2
    assert np.abs([r.loss for r in results] - expected).max() < apart
    for name, value in free.state.save().items():
        if value.dtype.kind == "f":
            assert np.abs(saved[name] - value).max() < 10 * apart, name


def test_a_source_may_be_changed_once_it_was_uploaded(monkeypatch):
    """CuPy launches the copy of a pinned array and returns."""
    cupy, gpu = stand_in(monkeypatch)
    target = StrictArray(np.zeros(4, np.float32))
    at_once = StrictArray.set
    stream = cupy.cuda.Stream()  # lazy: what is put there runs when it is waited for
    stream._lazy = True
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda index=-1: stream)
    monkeypatch.setattr(
        StrictArray, "set", lambda a, source: stream.put(lambda: at_once(a, source))
    )
    source = np.ones(4, np.float32)
    gpu.device.upload(source, target)
    source[:] = 2
    stream.synchronize()
    assert target.host.tolist() == [1, 1, 1, 1]


# bfloat16 where NumPy has no name for it.


@pytest.fixture
def without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)


@emulated
@pytest.mark.slow
def test_a_network_in_bfloat16_names_what_is_missing(without_ml_dtypes, monkeypatch):
    _, gpu = stand_in(monkeypatch)
    with pytest.raises(UnsupportedError, match="pip install ml_dtypes"):
        losses(gpu, precision="bfloat16")


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_matrices_of_whole_numbers_have_no_product(dtype, monkeypatch):
    stand_in(monkeypatch)
    whole = StrictArray(np.zeros((2, 2), dtype))
    with pytest.raises(UnsupportedError, match=f"no product of matrices of {dtype}"):
        CupyLauncher(lambda: None).prepared_matmul(whole, whole, whole)


# A machine with a driver and no toolkit.

LACKING = [
    "Failed to find CUDA headers. Please install the CUDA Toolkit or set CUDA_PATH",
    '/tmp/x.cubin.cu(56): catastrophic error: cannot open source file "cuda_fp16.h"',
    'x.cu(1): catastrophic error: cannot open source file "vector_types.h"',
    "libnvrtc.so.12: cannot open shared object file: No such file or directory",
    'DynamicLibNotFoundError: Failure finding "libcublas.so"',
    "CuPy failed to load libnvrtc.so.13: OSError",
]


@pytest.mark.parametrize("said", LACKING)
def test_what_cupy_lacks_is_told_with_what_to_install(said, monkeypatch):
    cupy, gpu = stand_in(monkeypatch)
    launcher = CupyLauncher(lambda: None)
    x = StrictArray(np.ones((2, 2), np.float32))

    def fails(*_, **__):
        raise RuntimeError(said)

    monkeypatch.setattr(StrictArray, "__setitem__", fails)
    monkeypatch.setattr(cupy, "matmul", fails)
    monkeypatch.setattr(cupy, "ascontiguousarray", fails)
    monkeypatch.setattr(cupy, "RawKernel", fails)
    for meets in (
        lambda: launcher.prepared_copy(0.0, x)(),
        lambda: launcher.prepared_matmul(x, x, x)(),
        lambda: gpu.kernels["relu"].run([x], [x], {}, None),
        lambda: gpu.device.randomize(x),
        lambda: gpu.device.dense(x.T),
        gpu.device.begin,
    ):
        with pytest.raises(BackendError, match=r"pip install '\.\[cuda13\]'") as e:
            meets()
        assert said in str(e.value)


@pytest.mark.parametrize(
    "said",
    [
        "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered",
        "CUBLAS_STATUS_EXECUTION_FAILED",
        'x.cu(3): error: identifier "y" is undefined',
    ],
)
def test_other_failures_are_not_blamed_on_the_toolkit(said):
    assert with_remedy(said) == said


# What a launch costs the host in a bound step, counted in calls of Python.


def bound(gpu, depth):
    """An executor of a step of so many blocks without convolutions, and its feeds."""
    g = GraphBuilder()
    x = g.input("image", (4, 3, 4, 4))
    for _ in range(depth):
        x = g.add(g.gelu(g.batch_norm(x)), x)
    label = g.input("label", (4,), "int64")
    loss = g.softmax_cross_entropy(g.linear(g.flatten(x), 3), label)
    graph = with_updates(training_graph(g.build(loss)), Adam())
    (placed,) = place_steps(Tuner(backend=gpu), [graph])
    state = StateStore(gpu.device, graph)
    made = Executor(gpu, placed.schedule, placed.layout, placed.plans, state)
    return made, random_feeds(graph)


@emulated
def test_a_bound_launch_is_one_call_of_python(monkeypatch):
    launches, calls = [], []
    for depth in (2, 16):
        cupy, gpu = stand_in(monkeypatch)
        executor, feeds = bound(gpu, depth)
        executor.run(feeds)
        launches.append(len(cupy.launched))
        cupy, gpu = stand_in(monkeypatch)
        # Called with a grid, a block and arguments, and no function of Python.
        monkeypatch.setattr(cupy, "RawKernel", lambda *_: slice)
        executor, feeds = bound(gpu, depth)
        executor.run(feeds)
        calls.append(python_calls(lambda run=executor.run, f=feeds: run(f)))
    more = launches[1] - launches[0]
    assert more >= 80
    # One a launch, and one a node that takes several.
    assert calls[1] - calls[0] < 1.7 * more


def test_a_bound_copy_makes_nothing_and_is_a_few_python_calls(monkeypatch):
    """Of which three ask the stand-in for the stream that computes."""
    cupy, gpu = stand_in(monkeypatch)
    runtime = cupy.cuda.runtime
    for name in ("eventRecord", "streamWaitEvent", "memcpyAsync"):
        setattr(runtime, name, max)  # called with numbers, and no function of Python
    copies = Copies([gpu.device.copier])
    there, here = cupy.empty(8, "uint8"), np.empty(8, np.uint8)
    out = copies.bound("out", 0, there, here, ())
    back = copies.bound("back", 1, here, there, (0,))

    def steps(count):
        for _ in range(count):
            out()
            back()
            copies.wait(1)

    steps(1)
    monkeypatch.setattr(cupy.cuda, "Event", None)
    each = python_calls(lambda: steps(11)) - python_calls(lambda: steps(1))
    assert each / 10 <= 2 * 6 + 5
