"""Half-precision filter gradients summed in float32, on the host."""

import pytest

from mucudnn import Tuner
from mucudnn.backends.cuda.conv import float32_sum
from mucudnn.backends.cuda.libcudnn import Status
from mucudnn.errors import BackendError, UnsupportedError
from mucudnn.ir.conv import Direction
from mucudnn.ir.numerics import FLOAT32_SUM, HALF_SUM
from tests.cuda_fake import HostSums, fake_backend
from tests.cuda_work import EXECUTE, Work, accumulating, layer, tuner_of
from tests.cudnn_fake import FakeCudnn
from tests.doubles import QUICK, plan_of
from tests.reference import relative_error


@pytest.fixture
def library():
    return FakeCudnn()


@pytest.fixture
def backend(library):
    return fake_backend(library)


@pytest.fixture
def cupy(monkeypatch):
    """The float32 sums run on the host."""
    fake = HostSums()
    monkeypatch.setitem(__import__("sys").modules, "cupy", fake)
    float32_sum._kernel.cache_clear()
    yield fake
    float32_sum._kernel.cache_clear()


def half(batch=8):
    return layer(batch, Direction.BACKWARD_FILTER, dtype="float16")


@accumulating
def test_a_part_is_two_launches_inside_one_workspace(
    accumulate, backend, library, cupy
):
    problem = half()
    work = Work(backend, problem)
    plan = plan_of(backend, problem, ("eng1+f32", 4), ("eng0+f32", 3), ("eng2+f32", 1))
    work.run(backend.bind(plan), accumulate)
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
    assert {kernel[:2] for kernel in cupy.launched} == {("sum_parts", "float16")}


def test_float32_sums_are_closer(backend, cupy):
    problem = half(64)
    work = Work(backend, problem)
    errors = []
    for algo in ("eng0", "eng0+f32"):
        work.run(backend.bind(plan_of(backend, problem, *[(algo, 1)] * 64)))
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

        def failing(source, name, options):
            kernel = raw(source, name, options)

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
