"""What cuDNN refuses, and operands that are not aligned: the result is right."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn import Tuner
from mucudnn.backends.cuda.conv.graph_api import ALIGNMENT
from mucudnn.backends.cuda.libcudnn import PROTOTYPES, Cudnn, Status
from mucudnn.errors import (
    BackendError,
    OutOfMemoryError,
    StepFailedError,
    UnsupportedError,
)
from mucudnn.passes.microbatch import aligned_batches, candidate_batches
from tests.conv_problems import conv_problem
from tests.cuda_fake import fake_backend
from tests.cuda_work import (
    EXECUTE,
    Work,
    accumulating,
    everywhere,
    layer,
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
