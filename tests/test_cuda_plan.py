"""The cuda backend over a library that computes on the CPU and remembers every call."""

import dataclasses
import gc
import math
import threading
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mucudnn import Tuner, conv2d, conv_backward_data, conv_backward_filter
from mucudnn.backends.cuda._cudnn import PROTOTYPES, Cudnn
from mucudnn.backends.cuda._enums import DescriptorType, Status
from mucudnn.backends.cuda.conv import float32_sum
from mucudnn.backends.cuda.conv.launch import Operands
from mucudnn.backends.cuda.conv.operation import ALIGNMENT
from mucudnn.backends.cuda.conv.plan import step_operands
from mucudnn.backends.cuda.session import LiveSession
from mucudnn.errors import (
    BackendError,
    OutOfMemoryError,
    StepFailedError,
    UnsupportedError,
)
from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem, Direction
from mucudnn.ir.numerics import DOWN_CONVERT, FLOAT32_SUM, HALF_SUM, NATIVE, TF32
from mucudnn.passes.microbatch import aligned_batches, candidate_batches
from mucudnn.runtime.cache import BenchmarkCache
from mucudnn.runtime.execution import compile_plan
from tests.cuda_fake import FakeArray, FakeCupy, fake_backend
from tests.cudnn_fake import ENGINES, FakeCudnn
from tests.doubles import QUICK, plan_of
from tests.reference import operands, reference, relative_error

EXECUTE = "cudnnBackendExecute"
LEGACY = MappingProxyType(
    {
        Direction.FORWARD: "IMPLICIT_PRECOMP_GEMM",
        Direction.BACKWARD_DATA: "ALGO_1[fma]",
        Direction.BACKWARD_FILTER: "ALGO_1",
    }
)
TOLERANCE = {"float16": 3e-3, "float32": 1e-6, "float64": 1e-12}


def layer(batch=8, direction=Direction.FORWARD, **options):
    """A sample is a multiple of 16 bytes in every data type."""
    shapes = {"x_shape": (batch, 4, 6, 4), "w_shape": (8, 4, 3, 3), "padding": 1}
    return ConvProblem(direction=direction, **{**shapes, **options})


@pytest.fixture
def library():
    return FakeCudnn()


@pytest.fixture
def backend(library):
    return fake_backend(library)


@pytest.fixture
def cupy(library, monkeypatch):
    """The float32 sums run on the host."""
    fake = FakeCupy(library)
    monkeypatch.setitem(__import__("sys").modules, "cupy", fake)
    float32_sum._kernel.cache_clear()
    yield fake
    float32_sum._kernel.cache_clear()


class Work:
    """Operands of a problem on the fake device, and what should come out."""

    def __init__(self, backend, problem, offset=0):
        self.problem = problem
        a, b = operands(problem)
        self.a, self.b = FakeArray.of(a, offset), FakeArray.of(b)
        spec = problem.operands()[2]
        self.before = (
            np.random.default_rng(1).uniform(-1, 1, spec.shape).astype(spec.dtype)
        )
        self.out = FakeArray.of(self.before)
        self.result = reference(problem, a, b)
        self.workspace = backend.device.allocate(1 << 16)

    def run(self, runner, accumulate=False):
        self.out.host[...] = self.before
        runner.run(self.a, self.b, self.out, self.workspace, accumulate)

    def right(self, accumulate=False):
        expected = self.result + (self.before if accumulate else 0)
        error = relative_error(self.out.host, expected)
        return error < TOLERANCE[self.problem.dtype]


def mixed(backend, problem):
    """A plan of both libraries, of four micro-batches."""
    return plan_of(
        backend,
        problem,
        ("eng1_k5=0", 3),
        (LEGACY[problem.direction], 2),
        ("eng0", 1),
        ("eng2", 2),
    )


everywhere = pytest.mark.parametrize("direction", Direction)
layouts = pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
accumulating = pytest.mark.parametrize("accumulate", [False, True])


# --- what is called ------------------------------------------------------------------


@everywhere
@layouts
@accumulating
def test_each_micro_batch_is_one_call_on_its_own_slice(
    direction, layout, accumulate, backend, library
):
    problem = layer(8, direction, layout=layout)
    work = Work(backend, problem)
    runner = compile_plan(backend, mixed(backend, problem))
    work.run(runner, accumulate)
    assert work.right(accumulate)
    done = library.executions
    assert [e.batch for e in done] == [3, 2, 1, 2]
    assert [e.algo for e in done] == [(1, ((5, 0),)), 1, (0, ()), (2, ())]
    assert {e.workspace for e in done if e.workspace_bytes} == {work.workspace.data.ptr}
    adds = direction is Direction.BACKWARD_FILTER
    assert [e.beta for e in done] == [
        float(accumulate or (adds and i > 0)) for i in range(4)
    ]


@given(
    parts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    direction=st.sampled_from(Direction),
    layout=st.sampled_from(["NCHW", "NHWC"]),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
)
@settings(max_examples=60, deadline=None)
def test_addresses_are_those_of_slices(parts, direction, layout, dtype):
    problem = layer(sum(parts), direction, layout=layout, dtype=dtype)
    steps = [AlgoPerf(algo="a", batch=n, time_ms=1.0, workspace=0) for n in parts]
    a, b, out = (np.empty(s.shape, s.dtype) for s in problem.operands())
    whole = Operands(a.ctypes.data, b.ctypes.data, out.ctypes.data, 7, 9)
    plan = ConvPlan(problem, tuple(steps))
    for window, _ in plan.slices():
        x, y, z = a, b, out
        match direction:
            case Direction.BACKWARD_FILTER:
                x, y = a[window], b[window]
            case _:
                x, z = a[window], out[window]
        assert step_operands(plan, window.start, whole) == Operands(
            x.ctypes.data, y.ctypes.data, z.ctypes.data, 7, 9
        )


@everywhere
def test_the_second_run_does_nothing_else(direction, backend, library):
    problem = layer(8, direction)
    work = Work(backend, problem)
    runner = compile_plan(backend, mixed(backend, problem))
    work.run(runner)
    library.log.clear()
    work.run(runner)
    assert work.right()
    names = [name for name, _ in library.log]
    assert [name == EXECUTE for name in names] == [True, False, True, True]
    assert names[1].startswith("cudnnConvolution")


def test_new_addresses_are_bound_once_more(backend, library):
    problem = layer()
    runner = compile_plan(backend, mixed(backend, problem))
    first, second = Work(backend, problem), Work(backend, problem)
    for work in (first, second, first, second):
        work.run(runner)
        assert work.right()
    packs = library.alive(DescriptorType.VARIANT_PACK)
    assert len(packs) == 2 * 3


def test_addresses_remembered_are_bounded(backend, library):
    problem = layer(1)
    runner = compile_plan(backend, plan_of(backend, problem, ("eng0", 1)))
    works = [Work(backend, problem) for _ in range(70)]
    for work in works:
        work.run(runner)
        assert work.right()
    assert len(library.alive(DescriptorType.VARIANT_PACK)) <= 64


def test_calls_outside_a_plan_are_kept_and_bounded(backend, library):
    problem = layer(1)
    room = FakeArray.of(np.zeros(300 * 64, np.uint8))
    work = Work(backend, problem)
    for i in range(300):
        workspace = room[64 * i :]
        for _ in range(2):
            backend.conv.run(problem, "eng0", work.a, work.b, work.out, workspace)
    packs = library.alive(DescriptorType.VARIANT_PACK)
    assert len(packs) == 256
    assert len(library.alive(DescriptorType.EXECUTION_PLAN)) == 1
    assert len(library.executions) == 600


def test_nothing_is_left_behind(library):
    backend = fake_backend(library)
    problem = layer()
    work = Work(backend, problem)
    runner = compile_plan(backend, mixed(backend, problem))
    work.run(runner)
    assert library.objects
    del backend, runner
    gc.collect()
    assert library.objects == {}


# --- numbers -------------------------------------------------------------------------

SHAPES = {
    "1-D": {"x_shape": (4, 4, 12), "w_shape": (8, 4, 3), "padding": 1, "stride": 2},
    "3-D": {
        "x_shape": (4, 2, 3, 4, 5),
        "w_shape": (4, 2, 2, 3, 1),
        "padding": (0, 1, 0),
    },
    "groups": {"groups": 2, "w_shape": (8, 2, 3, 3)},
    "depthwise": {"groups": 4, "w_shape": (8, 1, 3, 3)},
    "strided": {"stride": (2, 1), "dilation": (1, 2), "padding": (0, 2)},
}


@everywhere
@layouts
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_shape_reaches_the_library_intact(
    shape, dtype, layout, direction, backend
):
    problem = layer(4, direction, layout=layout, dtype=dtype, **shape)
    work = Work(backend, problem)
    for algo in ("eng0", LEGACY[direction]):
        plan = plan_of(backend, problem, (algo, 1), (algo, problem.batch - 1))
        work.run(compile_plan(backend, plan))
        assert work.right(), algo


def tuner_of(backend, **options):
    return Tuner(backend=backend, rule=QUICK, workspace_limit=4096, **options)


@everywhere
@layouts
@accumulating
def test_the_public_functions(direction, layout, accumulate, backend, library):
    problem = layer(8, direction, layout=layout)
    work = Work(backend, problem)
    options = {
        "padding": 1,
        "layout": layout,
        "tuner": tuner_of(backend),
        "accumulate": accumulate,
        "out": work.out,
    }
    shape = problem.operands()[2].shape
    for _ in range(2):
        work.out.host[...] = work.before
        match direction:
            case Direction.FORWARD:
                conv2d(work.a, work.b, **options)
            case Direction.BACKWARD_DATA:
                conv_backward_data(work.a, work.b, shape, **options)
            case Direction.BACKWARD_FILTER:
                conv_backward_filter(work.a, work.b, shape, **options)
        assert work.right(accumulate)
    last = library.executions[-2:]
    assert [(e.algo[0], e.batch) for e in last] == [(1, 4), (1, 4)]


# --- what is listed ------------------------------------------------------------------


def test_rows_are_the_librarys_favourites_then_every_engine_then_legacy(backend):
    rows = backend.conv.algorithms(layer(8))
    assert rows[:6] == [
        ("eng1_k5=0", 8192),
        ("eng1_k5=2_k14=0", 24576),
        ("eng2", 512),
        ("eng0", 0),
        ("eng1", 8192),
        ("eng3", 256),
    ]
    assert dict(rows)["GEMM[tensor_op]"] == 2 * 256 * 8
    names = [name for name, _ in rows]
    assert len({*names}) == len(names)
    excluded = dict(backend.conv.excluded(layer(8)))
    assert "3007" in excluded["FFT"]
    assert not {*names} & {*excluded}


def test_how_rows_compute(backend):
    traits = backend.conv.traits
    for dtype, tensor_core in (("float32", TF32), ("float16", NATIVE)):
        problem = layer(dtype=dtype)
        assert traits(problem, "eng1").math_mode == tensor_core
        assert traits(problem, "eng0").math_mode == NATIVE
        assert traits(problem, "eng3").math_mode == DOWN_CONVERT
        assert traits(problem, "GEMM").math_mode == tensor_core
        assert traits(problem, "GEMM[fma]").math_mode == NATIVE
    second = traits(layer(), "eng2")
    assert not second.deterministic
    assert second.notes == (
        "nondeterministic",
        "numerical_note_77",
        "runtime_compilation",
    )
    filters = layer(direction=Direction.BACKWARD_FILTER)
    assert not traits(filters, "ALGO_0").deterministic
    assert traits(filters, "ALGO_1").deterministic
    with pytest.raises(UnsupportedError, match="no algorithm 'eng9'"):
        traits(layer(), "eng9")


def test_legacy_determinism_where_the_library_does_not_say(backend, library):
    library.fail("cudnnGetConvolutionBackwardFilterAlgorithm_v7", 3000)
    filters = layer(direction=Direction.BACKWARD_FILTER)
    shifting = [
        name
        for name, _ in backend.conv.algorithms(filters)
        if not backend.conv.traits(filters, name).deterministic
    ]
    assert shifting[0] == "eng2"
    assert {name.split("[")[0] for name in shifting[1:]} == {"ALGO_0", "ALGO_3"}


def test_what_is_too_large_for_32_bits_is_left_to_the_graph_api(backend):
    huge = layer(2, x_shape=(2, 4, 1 << 15, 1 << 15))
    names = [name for name, _ in backend.conv.algorithms(huge)]
    assert "eng1" in names
    assert "GEMM" not in names
    assert "32 bits" in dict(backend.conv.excluded(huge))["GEMM"]


@pytest.mark.parametrize(
    ("numerics", "expected"), [("tf32", 1), ("down_convert", 3), ("strict", 2)]
)
def test_numerics_choose_among_engines(numerics, expected, backend, library):
    problem = layer()
    work = Work(backend, problem)
    tuner_of(backend, numerics=numerics).compiled(problem)(
        work.a, work.b, work.out, False
    )
    assert work.right()
    assert library.executions[-1].algo[0] == expected


def test_a_failing_engine_is_a_failed_row(backend, library):
    library.fail(EXECUTE, Status.EXECUTION_FAILED, times=1)
    table = tuner_of(backend, batch_policy="undivided").measure(layer())
    failed = [p for p in table.perfs if p.error and "cudnnBackendExecute" in p.error]
    assert len(failed) == 1
    assert "EXECUTION_FAILED (5000)" in failed[0].error


# --- handles and streams -------------------------------------------------------------


def test_a_stream_is_set_when_it_changes(backend, library):
    problem = layer(1)
    work = Work(backend, problem)
    runner = compile_plan(backend, plan_of(backend, problem, ("eng0", 1)))
    for stream in (0, 0, 64, 64, 0):
        backend.device.current = stream
        work.run(runner)
    assert [e.stream for e in library.executions] == [0, 0, 64, 64, 0]
    assert [stream for _, stream in library.calls_of("cudnnSetStream")] == [0, 64, 0]
    assert len(library.calls_of("cudnnCreate")) == 1


def test_a_thread_has_its_own_handle_as_long_as_it_lives(backend, library):
    problem = layer(2)
    work = Work(backend, problem)
    runner = compile_plan(backend, plan_of(backend, problem, ("eng0", 1), ("eng2", 1)))
    work.run(runner)
    threads = [threading.Thread(target=work.run, args=(runner,)) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    gc.collect()
    assert work.right()
    assert len({e.handle for e in library.executions}) == 3
    assert len(library.alive("handle")) == 1


def test_no_device_is_said_at_once(library):
    library.fail("cudnnCreate", Status.NOT_INITIALIZED)
    session = LiveSession(library, lambda: 0)
    with pytest.raises(BackendError, match=r"cudnnCreate returned .*\(1001\)"):
        session.handle()
    assert session.handle() == session.handle()


# --- failures ------------------------------------------------------------------------


@everywhere
@accumulating
@pytest.mark.parametrize("k", [0, 1, 2])
def test_the_rest_is_finished_once(direction, accumulate, k, backend, library, caplog):
    problem = layer(8, direction)
    steps = [("eng1_k5=0", 3), ("eng2", 4), ("eng1", 1)]
    plan = plan_of(backend, problem, *steps)
    done = (0, 3, 7)[k]
    work = Work(backend, problem)
    library.fail(EXECUTE, Status.EXECUTION_FAILED, skip=k)
    with pytest.raises(StepFailedError, match=r"\(5000\)") as caught:
        work.run(compile_plan(backend, plan), accumulate)
    assert (caught.value.algo, caught.value.done) == (steps[k][0], done)
    library.executions.clear()
    library.fail(EXECUTE, Status.EXECUTION_FAILED, skip=k)
    ready = tuner_of(backend).adopt(plan)
    work.out.host[...] = work.before
    ready(work.a, work.b, work.out, accumulate)
    assert work.right(accumulate)
    assert [e.batch for e in library.executions] == [n for _, n in steps[:k]] + [
        8 - done
    ]
    assert f"failed after {done} samples" in caplog.text


def test_a_legacy_call_that_fails_is_a_failed_step(backend, library):
    problem = layer(8)
    work = Work(backend, problem)
    library.fail("cudnnConvolutionForward", 4004)
    with pytest.raises(StepFailedError, match="cudnnConvolutionForward") as caught:
        work.run(compile_plan(backend, mixed(backend, problem)))
    assert caught.value.done == 3
    assert isinstance(caught.value.reason, OutOfMemoryError)


def test_a_handle_that_cannot_be_had_is_a_failed_step(backend, library):
    problem = layer(8)
    work = Work(backend, problem)
    runner = compile_plan(backend, mixed(backend, problem))
    work.run(runner)
    backend.device.current = 64
    library.fail("cudnnSetStream", Status.BAD_PARAM)
    with pytest.raises(StepFailedError, match="cudnnSetStream") as caught:
        work.run(runner)
    assert caught.value.done == 0
    work.run(runner)
    assert library.executions[-1].stream == 64


@pytest.mark.parametrize("algo", ["eng1", "GEMM"])
def test_a_workspace_one_byte_short_is_refused_before_the_call(algo, backend, library):
    problem = layer()
    work = Work(backend, problem)
    needed = dict(backend.conv.algorithms(problem))[algo]
    short = backend.device.allocate(needed - 1)
    with pytest.raises(BackendError, match=f"needs {needed} bytes .* got {needed - 1}"):
        backend.conv.run(problem, algo, work.a, work.b, work.out, short)
    with pytest.raises(BackendError, match="got 0"):
        backend.conv.run(problem, algo, work.a, work.b, work.out, None)
    runner = compile_plan(backend, plan_of(backend, problem, (algo, 8)))
    with pytest.raises(StepFailedError, match=f"needs {needed} bytes"):
        runner.run(work.a, work.b, work.out, short, False)
    assert library.executions == []


def test_memory_that_runs_short_gives_smaller_parts(backend, library, caplog):
    problem = layer()
    work = Work(backend, problem)
    ready = Tuner(backend=backend, rule=QUICK).compiled(problem)
    assert ready.plan.workspace == 8192
    backend.device.most = 2048
    ready(work.a, work.b, work.out, False)
    assert work.right()
    assert [e.batch for e in library.executions[-4:]] == [2] * 4
    assert "falling back" in caplog.text


class Shared:
    """A shared object: functions by name, of which the status ones answer `status`."""

    def __init__(self, status):
        self._status = status
        self.made = {}

    def __getattr__(self, name):
        def function(*arguments):
            if name == "cudnnGetErrorString":
                return f"CUDNN_STATUS_{arguments[0]}".encode()
            if name == "cudnnGetLastErrorString":
                arguments[0].value = b"what went wrong\n"
                return None
            return 91900 if name == "cudnnGetVersion" else self._status

        return self.made.setdefault(name, function)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (1001, BackendError),
        (2000, BackendError),
        (2003, BackendError),
        (3000, UnsupportedError),
        (3002, UnsupportedError),
        (3007, UnsupportedError),
        (3999, UnsupportedError),
        (4000, BackendError),
        (4003, OutOfMemoryError),
        (4004, OutOfMemoryError),
        (5000, BackendError),
        (5003, BackendError),
        (9999, BackendError),
    ],
)
def test_a_status_becomes_an_error_with_call_number_and_text(status, error):
    cudnn = Cudnn(Shared(status))
    expected = (
        rf"^cudnnDestroy returned CUDNN_STATUS_{status} \({status}\): what went wrong$"
    )
    with pytest.raises(error, match=expected):
        cudnn.call("cudnnDestroy", 1)
    assert cudnn.function("cudnnDestroy")(1) == status
    with pytest.raises(error, match=expected):
        cudnn.raise_for("cudnnDestroy", status)


def test_calls_have_prototypes_and_return_what_is_no_status():
    shared = Shared(0)
    cudnn = Cudnn(shared)
    assert cudnn.call("cudnnDestroy", 1) is None
    assert cudnn.call("cudnnGetVersion") == 91900
    for name, (result, arguments) in PROTOTYPES.items():
        assert shared.made[name].restype is result
        assert shared.made[name].argtypes is arguments


# --- alignment -----------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("offset", [4, 8])
def test_misaligned_operands_are_planned_as_they_are(
    offset, direction, backend, library, caplog
):
    problem = layer(8, direction)
    work = Work(backend, problem, offset)
    work.run(compile_plan(backend, plan_of(backend, problem, ("eng0", 4), ("eng2", 4))))
    assert work.right()
    assert {e.alignment for e in library.executions} == {offset}
    plan = plan_of(backend, problem, ("eng1", 4), ("eng1", 4))
    with pytest.raises(StepFailedError, match="3000") as caught:
        work.run(compile_plan(backend, plan))
    assert caught.value.done == 0
    tuner_of(backend).adopt(plan)(work.a, work.b, work.out, False)
    assert work.right()
    assert "finishing with another algorithm" in caplog.text


@given(
    sample=st.tuples(st.integers(1, 5), st.integers(3, 9), st.integers(3, 9)),
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    policy=st.sampled_from(["powers_of_two", "all"]),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_parts_of_aligned_sizes_begin_at_aligned_addresses(sample, dtype, policy, data):
    batch = data.draw(st.integers(1, 64))
    problem = ConvProblem(
        direction=Direction.FORWARD,
        x_shape=(batch, *sample),
        w_shape=(3, sample[0], 3, 3),
        dtype=dtype,
    )
    sizes = aligned_batches(problem, candidate_batches(batch, policy), ALIGNMENT)
    assert batch in sizes
    starts, left = [0], batch
    while left:
        fits = [n for n in sizes if n <= left]
        if not fits:  # such parts do not add up to the mini-batch
            return
        left -= data.draw(st.sampled_from(fits))
        starts.append(batch - left)
    for shape in (problem.x_shape, problem.y_shape):
        nbytes = problem.itemsize * math.prod(shape[1:])
        assert all(start * nbytes % ALIGNMENT == 0 for start in starts[:-1])


def test_odd_images_are_divided_where_the_next_part_is_aligned(backend, library):
    odd = layer(16, x_shape=(16, 1, 3, 3), w_shape=(1, 1, 3, 3), dtype="float16")
    table = tuner_of(backend).measure(odd)
    assert table.batches() == (8, 16)
    work = Work(backend, odd)
    work.run(compile_plan(backend, plan_of(backend, odd, ("eng1", 8), ("eng1", 8))))
    assert work.right()
    library.executions.clear()
    work.run(compile_plan(backend, plan_of(backend, odd, ("eng0", 1), ("eng0", 15))))
    assert work.right()
    assert [e.alignment for e in library.executions] == [16, 2]


# --- sums in float32 -----------------------------------------------------------------


def half(batch=8):
    return layer(batch, Direction.BACKWARD_FILTER, dtype="float16")


@accumulating
def test_a_part_is_two_launches_inside_one_workspace(
    accumulate, backend, library, cupy
):
    problem = half()
    work = Work(backend, problem)
    plan = plan_of(backend, problem, ("eng1+f32", 4), ("eng0+f32", 3), ("eng2+f32", 1))
    work.run(compile_plan(backend, plan), accumulate)
    assert work.right(accumulate)
    start, count = work.workspace.data.ptr, 8 * 4 * 3 * 3
    sums, part = 1280, 768  # 4 and 2 bytes an element, rounded up to 256
    assert dict(backend.conv.algorithms(problem))["eng1+f32"] == 8192 + sums + part
    assert [e.beta for e in library.executions] == [0.0] * 3
    assert {e.pointers[1] for e in library.executions} == {start + sums}
    assert {e.workspace for e in library.executions} == {start + sums + part}
    assert [tuple(map(int, a)) for *_, a in cupy.launched] == [
        (start + sums, start, work.out.data.ptr, count, int(first), int(accumulate))
        for first in (True, False, False)
    ]
    assert {name for name, *_ in cupy.launched} == {"sum_float16"}


def test_float32_sums_are_closer(backend, cupy):
    problem = half(64)
    work = Work(backend, problem)
    errors = []
    for algo in ("eng0", "eng0+f32"):
        work.run(compile_plan(backend, plan_of(backend, problem, *[(algo, 1)] * 64)))
        errors.append(relative_error(work.out.host, work.result))
    assert errors[1] < errors[0] / 2


def test_float32_sums_are_for_parts_of_half_precision_filter_gradients(backend):
    conv = backend.conv
    for problem in (layer(dtype="float16"), layer(direction=Direction.BACKWARD_FILTER)):
        assert not any(n.endswith("+f32") for n, _ in conv.algorithms(problem))
        work = Work(backend, problem)
        with pytest.raises(UnsupportedError, match="half-precision filter gradients"):
            conv.run(problem, "eng0+f32", work.a, work.b, work.out, work.workspace)
    assert HALF_SUM in conv.traits(half(), "eng0").notes
    assert FLOAT32_SUM in conv.traits(half(), "eng0+f32").notes
    names = [name for name, _ in conv.algorithms(half())]
    assert sorted(n + "+f32" for n in names if not n.endswith("+f32")) == sorted(
        n for n in names if n.endswith("+f32")
    )


def test_float32_sums_without_their_workspace_are_refused(backend):
    work = Work(backend, half())
    with pytest.raises(BackendError, match=r"needs 2048 bytes .* got 2047"):
        backend.conv.run(
            half(), "eng0+f32", work.a, work.b, work.out, work.workspace[:2047]
        )


def test_numerics_ask_for_float32_sums_of_parts_only(backend, library, cupy):
    tuner = Tuner(
        backend=backend, rule=QUICK, numerics="float32_sums", workspace_limit=7000
    )
    (plan,) = tuner.plan([half()])
    assert plan.divided
    assert all(step.algo.endswith("+f32") for step in plan.steps)
    whole = Tuner(backend=backend, rule=QUICK, numerics="float32_sums").plan([half()])
    assert [step.algo for step in whole[0].steps] == ["eng1"]


@accumulating
@pytest.mark.parametrize("where", ["engine", "sum"])
def test_a_failure_among_float32_sums_loses_nothing(
    where, accumulate, backend, library, cupy, monkeypatch
):
    problem = half()
    work = Work(backend, problem)
    ready = tuner_of(backend).adopt(
        plan_of(backend, problem, ("eng1+f32", 4), ("eng2+f32", 4))
    )
    if where == "engine":
        library.fail(EXECUTE, Status.EXECUTION_FAILED, skip=1)
    else:
        raw, calls = cupy.RawKernel, []

        def failing(source, name):
            kernel = raw(source, name)

            def launch(*arguments):
                calls.append(name)
                if len(calls) == 2:
                    raise RuntimeError("no such kernel")
                kernel(*arguments)

            return launch

        monkeypatch.setattr(cupy, "RawKernel", failing)
    work.out.host[...] = work.before
    ready(work.a, work.b, work.out, accumulate)
    assert work.right(accumulate)
    last = library.executions[-1]
    assert (last.batch, last.algo) == (4, (0, ()))


# --- graphs --------------------------------------------------------------------------


@everywhere
def test_a_replayed_plan_is_captured_on_its_second_run(direction, backend, library):
    problem = layer(8, direction)
    work = Work(backend, problem)
    device = backend.device
    runner = compile_plan(backend, mixed(backend, problem), replay=True)
    counts = []
    for _ in range(4):
        work.run(runner)
        assert work.right()
        counts.append((device.captures, device.graph_launches))
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 3)]
    assert len(library.executions) == 16
    library.log.clear()
    work.run(runner)
    assert library.log == []
    other = Work(backend, problem)
    other.run(runner)
    assert other.right()
    assert device.captures == 1


@accumulating
def test_what_cannot_be_captured_runs_call_by_call(
    accumulate, backend, library, caplog
):
    problem = layer(8, Direction.BACKWARD_FILTER)
    work = Work(backend, problem)
    plan = plan_of(backend, problem, ("eng1", 4), ("eng0", 4))
    ready = tuner_of(backend, replay=True).adopt(plan)
    for turn in range(4):
        if turn == 1:  # the second call of the capture
            library.fail(EXECUTE, Status.NOT_SUPPORTED, skip=1)
        work.out.host[...] = work.before
        ready(work.a, work.b, work.out, accumulate)
        assert work.right(accumulate)
    assert [e.batch for e in library.executions] == [4, 4] * 4
    assert caplog.text.count("is not replayed") == 1
    assert "finishing" not in caplog.text


# --- plans as text -------------------------------------------------------------------


def test_plans_are_remembered_and_restored(tmp_path):
    problem = layer()
    steps = [("eng1_k5=2_k14=0", 4), ("eng1_k5=2_k14=0", 4)]
    for turn in range(2):
        library = FakeCudnn()
        backend = fake_backend(library)
        cache = BenchmarkCache(tmp_path / "cache.sqlite")
        plan = plan_of(fake_backend(), problem, *steps)
        ready = tuner_of(backend, cache=cache).adopt(plan)
        text = cache.get_plan_text("cuda/fake", problem.with_batch(4), steps[0][0])
        assert text == backend.conv.dumps(problem.with_batch(4), steps[0][0])
        work = Work(backend, problem)
        ready(work.a, work.b, work.out, False)
        assert work.right()
        made = [kind for kind, _ in library.calls_of("cudnnBackendCreateDescriptor")]
        assert (DescriptorType.ENGINECFG in made) == (turn == 0)
        cache.close()


@pytest.mark.parametrize("old", ["of a newer version", "not JSON at all"])
def test_a_text_that_is_refused_is_replaced(old):
    problem, cache = layer(4), BenchmarkCache()
    other = fake_backend(FakeCudnn(version=2))
    plan = plan_of(other, problem, ("eng1", 4))
    text = other.conv.dumps(problem, "eng1") if old.startswith("of") else old
    cache.put_plan_text("cuda/fake", problem, "eng1", text)
    backend = fake_backend()
    ready = tuner_of(backend, cache=cache).adopt(plan)
    assert cache.get_plan_text("cuda/fake", problem, "eng1") != text
    work = Work(backend, problem)
    ready(work.a, work.b, work.out, False)
    assert work.right()


def test_what_has_no_text_is_not_remembered():
    backend, cache = fake_backend(), BenchmarkCache()
    tuner_of(backend, cache=cache).adopt(plan_of(backend, layer(4), ("GEMM", 4)))
    assert cache.get_plan_text("cuda/fake", layer(4), "GEMM") is None
    assert backend.conv.dumps(layer(4), "GEMM") is None


def test_a_plan_that_cannot_be_built_is_found_out_by_running_it(library, caplog):
    backend = fake_backend(library)
    plan = plan_of(backend, layer(4), ("eng1", 4))
    broken = dataclasses.replace(plan.steps[0], algo="eng9_k1=2")
    plan = dataclasses.replace(plan, steps=(broken,))
    work = Work(backend, layer(4))
    tuner_of(backend).adopt(plan)(work.a, work.b, work.out, False)
    assert work.right()
    assert "eng9_k1=2 failed after 0 samples" in caplog.text


def test_the_fake_refuses_what_the_library_would():
    """Else its passing would mean little."""
    library = FakeCudnn()
    backend = fake_backend(library)
    work = Work(backend, layer(4))
    runner = compile_plan(backend, plan_of(backend, layer(4), ("eng0", 4)))
    work.run(runner)
    plan, pack = library.calls_of(EXECUTE)[0][1:]
    handle = library.executions[0].handle
    assert library.function(EXECUTE)(handle + 1, plan, pack) == Status.BAD_PARAM
    assert library.function(EXECUTE)(handle, pack, plan) == Status.BAD_PARAM
    assert library.function("cudnnBackendFinalize")(1) == Status.BAD_PARAM
    assert set(ENGINES) == {0, 1, 2, 3}
