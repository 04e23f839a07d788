"""The cuda backend over a library that computes on the CPU and remembers every call.

It may refuse any call, and operands need not be aligned: the result is right.
"""

import dataclasses
import gc
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn import Tuner, conv2d, conv_backward_data, conv_backward_filter
from mucudnn.backends.cuda.conv.graph_api import ALIGNMENT
from mucudnn.backends.cuda.descriptors import LiveSession
from mucudnn.backends.cuda.libcudnn import PROTOTYPES, Cudnn, DescriptorType, Status
from mucudnn.errors import (
    BackendError,
    OutOfMemoryError,
    StepFailedError,
    UnsupportedError,
    VerificationError,
)
from mucudnn.ir.conv import Direction
from mucudnn.ir.numerics import DOWN_CONVERT, NATIVE, TF32
from mucudnn.passes.microbatch import aligned_batches, candidate_batches
from mucudnn.runtime.store.measurements import BenchmarkCache
from tests.conv_problems import conv_problem
from tests.cuda_fake import FakeArray, fake_backend
from tests.cuda_work import (
    EXECUTE,
    LEGACY,
    Work,
    accumulating,
    everywhere,
    layer,
    layouts,
    mixed,
    tuner_of,
)
from tests.cudnn_fake import FakeCudnn
from tests.doubles import QUICK, plan_of
from tests.examples import examples


@pytest.fixture
def library():
    return FakeCudnn()


@pytest.fixture
def backend(library):
    return fake_backend(library)


# --- what is called ------------------------------------------------------------------


@everywhere
@layouts
@accumulating
def test_each_micro_batch_is_one_call_on_its_own_slice(
    direction, layout, accumulate, backend, library
):
    problem = layer(8, direction, layout=layout)
    work = Work(backend, problem)
    runner = backend.bind(mixed(backend, problem))
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


@everywhere
def test_the_second_run_does_nothing_else(direction, backend, library):
    problem = layer(8, direction)
    work = Work(backend, problem)
    runner = backend.bind(mixed(backend, problem))
    work.run(runner)
    library.log.clear()
    work.run(runner)
    assert work.right()
    names = [name for name, _ in library.log]
    assert [name == EXECUTE for name in names] == [True, False, True, True]
    assert names[1].startswith("cudnnConvolution")


def test_new_addresses_are_bound_once_more(backend, library):
    """Of operands and of workspaces; those remembered are bounded."""
    problem = layer()
    runner = backend.bind(mixed(backend, problem))
    first, second = Work(backend, problem), Work(backend, problem)
    for work in (first, second, first, second):
        work.run(runner)
        assert work.right()
    assert len(library.alive(DescriptorType.VARIANT_PACK)) == 2 * 3
    second.workspace = backend.device.allocate(1 << 16)
    library.executions.clear()
    second.run(runner)
    assert second.right()
    used = {e.workspace for e in library.executions if e.workspace}
    assert used == {second.workspace.data.ptr}
    for work in [Work(backend, problem) for _ in range(70)]:
        work.run(runner)
        assert work.right()
    assert len(library.alive(DescriptorType.VARIANT_PACK)) <= 3 * 64


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


@everywhere
def test_adding_and_overwriting_are_two_calls(direction, backend):
    """On the same addresses, by turns, in a plan and outside of one."""
    problem = layer(8, direction)
    work = Work(backend, problem)
    runner = backend.bind(mixed(backend, problem))
    for accumulate in (False, True, False, True):
        work.run(runner, accumulate)
        assert work.right(accumulate)
    for algo in ("eng0", LEGACY[direction]):
        for accumulate in (False, True, False, True):
            work.out.host[...] = work.before
            backend.conv.run(
                problem,
                algo,
                work.a,
                work.b,
                work.out,
                work.workspace,
                accumulate=accumulate,
            )
            assert work.right(accumulate)


def test_nothing_is_left_behind(library):
    backend = fake_backend(library)
    problem = layer()
    work = Work(backend, problem)
    runner = backend.bind(mixed(backend, problem))
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
        work.run(backend.bind(plan))
        assert work.right(), algo


@everywhere
@pytest.mark.parametrize(("accumulate", "which"), [(False, 0), (True, 1)])
def test_out_may_overlap_an_operand(direction, accumulate, which, backend):
    problem = layer(8, direction)
    tuner = tuner_of(backend)
    for shift in (0, 16, -16, 64):
        work = Work(backend, problem)
        operand = (work.a, work.b)[which].host
        room = np.zeros(2 * operand.nbytes + work.before.nbytes, operand.dtype)
        memory = room.view(np.uint8)
        start = operand.nbytes - room.ctypes.data % 16
        end, first = start + operand.nbytes, start + shift
        there = memory[start:end].view(operand.dtype).reshape(operand.shape)
        out = memory[first : first + work.before.nbytes].view(operand.dtype)
        work.out = FakeArray(out.reshape(work.before.shape))
        there[...] = operand
        work.before = work.out.host.copy()
        given = [work.a, work.b]
        given[which] = FakeArray(there)
        options = {"tuner": tuner, "accumulate": accumulate, "out": work.out}
        shape = problem.operands()[2].shape
        match direction:
            case Direction.FORWARD:
                conv2d(*given, padding=1, **options)
            case Direction.BACKWARD_DATA:
                conv_backward_data(*given, shape, padding=1, **options)
            case Direction.BACKWARD_FILTER:
                conv_backward_filter(*given, shape, padding=1, **options)
        assert work.right(accumulate), shift


@everywhere
@accumulating
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_divided_plans_are_verified(direction, accumulate, dtype, backend, library):
    """TF32 and half-precision sums are within what rounding explains."""
    problem = layer(8, direction, dtype=dtype)
    work = Work(backend, problem)
    ready = Tuner(backend=backend, cache=None, verify=1).adopt(mixed(backend, problem))
    ready(work.a, work.b, work.out, accumulate)
    assert work.right(accumulate)
    assert [e.batch for e in library.executions] == [8, 3, 2, 1, 2]
    work.out.host[...] = work.before
    library.executions.clear()
    ready._runner = SimpleNamespace(plan=ready.plan, run=lambda *_: None)
    with pytest.raises(VerificationError, match="in one call by"):
        ready(work.a, work.b, work.out, accumulate)


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
    runner = backend.bind(plan_of(backend, problem, ("eng0", 1)))
    cupy = backend.device.cupy
    one, two = cupy.current, cupy.cuda.Stream(non_blocking=True)
    for stream in (one, one, two, two, one):
        cupy.current = stream
        work.run(runner)
    one, two = one.ptr, two.ptr
    assert [e.stream for e in library.executions] == [one, one, two, two, one]
    set_to = [stream for _, stream in library.calls_of("cudnnSetStream")]
    assert set_to == [one, two, one]
    assert len(library.calls_of("cudnnCreate")) == 1


def test_a_thread_has_its_own_handle_as_long_as_it_lives(backend, library):
    problem = layer(2)
    work = Work(backend, problem)
    runner = backend.bind(plan_of(backend, problem, ("eng0", 1), ("eng2", 1)))
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


# --- graphs --------------------------------------------------------------------------


@everywhere
def test_a_replayed_plan_is_captured_on_its_second_run(direction, backend, library):
    problem = layer(8, direction)
    work = Work(backend, problem)
    cupy = backend.device.cupy
    runner = backend.bind(mixed(backend, problem), replay=True)
    counts = []
    for _ in range(4):
        work.run(runner)
        assert work.right()
        counts.append((len(cupy.captured), cupy.replayed))
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 3)]
    assert len(library.executions) == 16
    library.log.clear()
    work.run(runner)
    assert library.log == []
    other = Work(backend, problem)
    other.run(runner)
    assert other.right()
    assert len(cupy.captured) == 1


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
        device = backend.device.fingerprint
        text = cache.get_plan_text(device, problem.with_batch(4), steps[0][0])
        assert text == backend.conv.dumps(problem.with_batch(4), steps[0][0])
        work = Work(backend, problem)
        ready(work.a, work.b, work.out, False)
        assert work.right()
        made = [kind for kind, _ in library.calls_of("cudnnBackendCreateDescriptor")]
        assert (DescriptorType.ENGINECFG in made) == (turn == 0)
        tuner_of(backend, cache=cache).adopt(plan_of(backend, layer(4), ("GEMM", 4)))
        assert cache.get_plan_text(device, layer(4), "GEMM") is None
        assert backend.conv.dumps(layer(4), "GEMM") is None
        cache.close()


@pytest.mark.parametrize("old", ["of a newer version", "not JSON at all"])
def test_a_text_that_is_refused_is_replaced(old):
    problem, cache = layer(4), BenchmarkCache()
    other = fake_backend(FakeCudnn(version=2))
    plan = plan_of(other, problem, ("eng1", 4))
    text = other.conv.dumps(problem, "eng1") if old.startswith("of") else old
    backend = fake_backend()
    device = backend.device.fingerprint
    cache.put_plan_text(device, problem, "eng1", text)
    ready = tuner_of(backend, cache=cache).adopt(plan)
    assert cache.get_plan_text(device, problem, "eng1") != text
    work = Work(backend, problem)
    ready(work.a, work.b, work.out, False)
    assert work.right()


def test_a_plan_that_cannot_be_built_is_found_out_by_running_it(library, caplog):
    backend = fake_backend(library)
    plan = plan_of(backend, layer(4), ("eng1", 4))
    broken = dataclasses.replace(plan.steps[0], algo="eng9_k1=2")
    plan = dataclasses.replace(plan, steps=(broken,))
    work = Work(backend, layer(4))
    tuner_of(backend).adopt(plan)(work.a, work.b, work.out, False)
    assert work.right()
    assert "eng9_k1=2 failed after 0 samples" in caplog.text


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
        work.run(backend.bind(plan), accumulate)
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
        work.run(backend.bind(mixed(backend, problem)))
    assert caught.value.done == 3
    assert isinstance(caught.value.reason, OutOfMemoryError)


def test_a_handle_that_cannot_be_had_is_a_failed_step(backend, library):
    problem = layer(8)
    work = Work(backend, problem)
    runner = backend.bind(mixed(backend, problem))
    work.run(runner)
    cupy = backend.device.cupy
    cupy.current = cupy.cuda.Stream(non_blocking=True)
    library.fail("cudnnSetStream", Status.BAD_PARAM)
    with pytest.raises(StepFailedError, match="cudnnSetStream") as caught:
        work.run(runner)
    assert caught.value.done == 0
    work.run(runner)
    assert library.executions[-1].stream == cupy.current.ptr


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
    runner = backend.bind(plan_of(backend, problem, (algo, 8)))
    with pytest.raises(StepFailedError, match=f"needs {needed} bytes"):
        runner.run(work.a, work.b, work.out, short, False)
    assert library.executions == []
    assert np.array_equal(work.out.host, work.before)


def test_memory_that_runs_short_gives_smaller_parts(backend, library, caplog):
    problem = layer()
    work = Work(backend, problem)
    ready = Tuner(backend=backend, rule=QUICK, cache=None).compiled(problem)
    assert ready.plan.workspace == 8192
    backend.device.cupy.most = 2048
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
    work.run(backend.bind(plan_of(backend, problem, ("eng0", 4), ("eng2", 4))))
    assert work.right()
    assert {e.alignment for e in library.executions} == {offset}
    plan = plan_of(backend, problem, ("eng1", 4), ("eng1", 4))
    with pytest.raises(StepFailedError, match="3000") as caught:
        work.run(backend.bind(plan))
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
@examples(100)
def test_parts_of_aligned_sizes_begin_at_aligned_addresses(sample, dtype, policy, data):
    batch = data.draw(st.integers(1, 64))
    problem = conv_problem((batch, *sample), (3, sample[0], 3, 3), dtype=dtype)
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
    work.run(backend.bind(plan_of(backend, odd, ("eng1", 8), ("eng1", 8))))
    assert work.right()
    library.executions.clear()
    work.run(backend.bind(plan_of(backend, odd, ("eng0", 1), ("eng0", 15))))
    assert work.right()
    assert [e.alignment for e in library.executions] == [16, 2]
