"""cuDNN on a GPU against float64: every algorithm, divided, in streams, as graphs."""

import dataclasses
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mucudnn import Tuner
from mucudnn.backends import get_backend
from mucudnn.backends.cuda.conv.graph_api import ALIGNMENT
from mucudnn.backends.cuda.descriptors import describe_device
from mucudnn.errors import BackendError, MucudnnError, OutOfMemoryError
from mucudnn.ir.conv import ConvPlan, ConvProblem, Direction
from mucudnn.ir.numerics import DOWN_CONVERT, TF32
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.result_check import ResultCheck
from tests.conv_problems import conv_problem
from tests.doubles import QUICK, Tight, plan_of
from tests.reference import reference, relative_error
from tests.test_functional import LAYERS, call, variant

pytestmark = pytest.mark.gpu

MIB = 1 << 20
GUARD = 4096
NATIVE_TOLERANCE = {
    "float64": 1e-11,
    "float32": 2e-5,
    "float16": 5e-3,
    "bfloat16": 4e-2,
}
everywhere = pytest.mark.parametrize("direction", Direction)
layouts = pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
accumulating = pytest.mark.parametrize("accumulate", [False, True])


def tolerance(problem, traits):
    """Greatest error over greatest value that a way of computing may have."""
    native = NATIVE_TOLERANCE[problem.dtype]
    if traits.math_mode == DOWN_CONVERT:
        return max(native, 4e-2)
    if traits.math_mode == TF32:
        return max(native, 4e-3)
    if {"fft", "winograd", "reduced_precision_reduction"} & {*traits.notes}:
        return 10 * native
    return native


# --- operands ------------------------------------------------------------------------


def rounded(values, dtype):
    """float64 numbers that `dtype` holds exactly."""
    if dtype != "bfloat16":
        return values.astype(dtype).astype(np.float64)
    bits = values.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def stored(values, dtype):
    """As an array whose bytes are `dtype`'s; bfloat16 as bits."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def loaded(array, dtype):
    """What `stored` wrote, in float64."""
    if dtype != "bfloat16":
        return array.astype(np.float64)
    return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class Work:
    """Operands on the GPU, and what should come out.

    Args:
        problem: At its whole mini-batch.
        lead: Elements before the first operand, which move it off its alignment.
    """

    def __init__(self, problem, lead=0):
        import cupy

        self._cupy = cupy
        self.problem = problem
        rng = np.random.default_rng(0)
        self.host = [
            rounded(rng.uniform(-1, 1, spec.shape), problem.dtype)
            for spec in problem.operands()
        ]
        a, b, before = (stored(values, problem.dtype) for values in self.host)
        room = cupy.zeros(a.size + lead, a.dtype)
        self.a = room[lead:].reshape(a.shape)
        self.a[...] = cupy.asarray(a)
        self.b, self.before = cupy.asarray(b), cupy.asarray(before)
        self.out = self.before.copy()
        self.result = reference(problem, *self.host[:2])

    def fresh(self):
        """The output as it was before anything ran; returns it."""
        self.out[...] = self.before
        return self.out

    def error(self, accumulate=False):
        """Of what `out` holds, relative to the greatest value."""
        found = loaded(self._cupy.asnumpy(self.out), self.problem.dtype)
        expected = self.result + (self.host[2] if accumulate else 0)
        return relative_error(found, expected)


def common(backend, problem, batches, most=8):
    """Algorithms that every micro-batch size has, cuDNN's favourites first."""
    lists = [dict(backend.conv.algorithms(problem.with_batch(n))) for n in batches]
    names = [name for name in lists[0] if all(name in other for other in lists)]
    return names[:most]


# --- every algorithm -----------------------------------------------------------------

CASES = {
    "padded": {"x_shape": (5, 16, 13, 12), "w_shape": (24, 16, 3, 3), "padding": 1},
    "odd": {"x_shape": (3, 5, 11, 9), "w_shape": (7, 5, 3, 2), "padding": (2, 0)},
    "five": {"x_shape": (4, 8, 15, 15), "w_shape": (16, 8, 5, 5), "padding": 2},
    "strided": {"x_shape": (3, 8, 17, 15), "w_shape": (16, 8, 3, 3), "stride": (2, 3)},
    "dilated": {"x_shape": (3, 8, 17, 15), "w_shape": (8, 8, 3, 3), "dilation": 2},
    "one_by_one": {"x_shape": (4, 32, 7, 7), "w_shape": (16, 32, 1, 1)},
    "groups": {"x_shape": (3, 16, 9, 9), "w_shape": (32, 4, 3, 3), "groups": 4},
    "depthwise": {"x_shape": (3, 16, 9, 9), "w_shape": (16, 1, 3, 3), "groups": 16},
    "1-D": {"x_shape": (4, 8, 50), "w_shape": (16, 8, 5), "padding": 2},
    "3-D": {
        "x_shape": (2, 8, 6, 7, 8),
        "w_shape": (8, 8, 3, 2, 3),
        "padding": (1, 0, 1),
    },
}
OTHER_TYPES = ("padded", "groups")


def cases():
    for name, fields in CASES.items():
        for dtype in NATIVE_TOLERANCE:
            if dtype in ("float64", "bfloat16") and name not in OTHER_TYPES:
                continue
            yield pytest.param({**fields, "dtype": dtype}, id=f"{name}-{dtype}")


def guarded(nbytes):
    """Workspace of exactly these bytes, NaNs, inside a larger buffer of them."""
    import cupy

    room = cupy.full(nbytes + 2 * GUARD, 0xFF, "uint8")
    return room, room[GUARD : GUARD + nbytes]


def untouched(room, nbytes):
    import cupy

    edges = cupy.concatenate([room[:GUARD], room[GUARD + nbytes :]])
    return bool((edges == 0xFF).all())


def checked(cuda, problem, work):
    """A check of a problem's algorithms on its operands, with a result of its own."""
    spec = problem.operands()[2]
    buffer = cuda.device.allocate(spec.nbytes)
    out = cuda.device.view(buffer, 0, spec)
    buffers = *(one.reshape(-1).view("uint8") for one in (work.a, work.b)), buffer
    return ResultCheck(cuda, problem, (work.a, work.b, out), buffers)


@pytest.mark.slow
@everywhere
@layouts
@pytest.mark.parametrize("case", [*cases()])
def test_every_algorithm_agrees_with_float64(case, layout, direction, cuda):
    """Overwriting and adding, inside its workspace; few may fail.

    None may be wrong that is not found to be wrong before it is timed.
    """
    problem = ConvProblem(direction=direction, layout=layout, **case)
    work = Work(problem)
    check = checked(cuda, problem, work)
    rows = cuda.conv.algorithms(problem)
    wrong, failed = [], []
    for name, nbytes in rows:
        room, workspace = guarded(max(nbytes, MIB))
        try:
            traits, fault = check.judged(name, workspace, workspace.nbytes)
        except MucudnnError as e:
            failed.append(f"{name}: {e}")
            continue
        if fault:
            failed.append(f"{name}: {fault}")
            continue
        most = tolerance(problem, traits)
        for accumulate in (False, True):
            room, workspace = guarded(nbytes)
            out = work.fresh()
            try:
                cuda.conv.run(
                    problem, name, work.a, work.b, out, workspace, accumulate=accumulate
                )
            except MucudnnError as e:
                failed.append(f"{name} accumulate={accumulate}: {e}")
                continue
            error = work.error(accumulate)
            if not error <= most or not untouched(room, nbytes):
                wrong.append(f"{name} accumulate={accumulate}: {error:.2g} > {most}")
    assert rows
    assert wrong == []
    assert len(failed) <= len(rows) / 5, failed


@everywhere
def test_deterministic_algorithms_repeat_their_bits(direction, cuda):
    problem = ConvProblem(direction=direction, **CASES["padded"])
    work = Work(problem)
    checked = 0
    for name, nbytes in cuda.conv.algorithms(problem):
        if not cuda.conv.traits(problem, name).deterministic:
            continue
        results = set()
        for _ in range(3):
            _, workspace = guarded(nbytes)
            try:
                cuda.conv.run(problem, name, work.a, work.b, work.fresh(), workspace)
            except MucudnnError:
                break
            results.add(work.out.tobytes())
        else:
            assert len(results) == 1, name
            checked += 1
    assert checked


def test_a_workspace_one_byte_short_is_refused(cuda):
    problem = ConvProblem(direction=Direction.FORWARD, **CASES["five"])
    work = Work(problem)
    hungry = [(n, b) for n, b in cuda.conv.algorithms(problem) if b > 1]
    assert hungry
    for name, nbytes in hungry[:10]:
        short = cuda.device.allocate(nbytes - 1)
        with pytest.raises(BackendError, match=f"needs {nbytes} bytes"):
            cuda.conv.run(problem, name, work.a, work.b, work.out, short)


# --- divided -------------------------------------------------------------------------


@everywhere
@layouts
@accumulating
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("parts", [(13,), (6, 7), (1, 3, 9), (4, 4, 4, 1), (1,) * 13])
def test_division_changes_nothing(parts, dtype, accumulate, layout, direction, cuda):
    problem = conv_problem(
        (13, 8, 10, 8), (16, 8, 3, 3), direction, padding=1, dtype=dtype, layout=layout
    )
    work = Work(problem)
    for algo in common(cuda, problem, {*parts}):
        plan = plan_of(cuda, problem, *((algo, part) for part in parts))
        workspace = cuda.device.allocate(plan.workspace)
        runner = cuda.bind(plan)
        most = tolerance(problem, cuda.conv.traits(problem, algo)) * math.sqrt(13)
        for _ in range(2):
            runner.run(work.a, work.b, work.fresh(), workspace, accumulate)
            assert work.error(accumulate) <= most, algo


@everywhere
def test_parts_may_differ_in_size_and_algorithm(direction, cuda):
    problem = ConvProblem(direction=direction, **CASES["padded"]).with_batch(11)
    work = Work(problem)
    by_part = [(n, common(cuda, problem, {n}, 60)) for n in (4, 5, 2)]
    for first in range(3):
        steps = [
            (names[(7 * first + 3 * i) % len(names)], n)
            for i, (n, names) in enumerate(by_part)
        ]
        plan = plan_of(cuda, problem, *steps)
        workspace = cuda.device.allocate(plan.workspace)
        cuda.bind(plan).run(work.a, work.b, work.fresh(), workspace, accumulate=False)
        assert work.error() <= 4e-2, steps


@everywhere
@layouts
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_the_public_functions(layer, layout, direction, cuda):
    """The CPU's test bodies, planned by measurement."""
    problem = variant(layer, direction, layout)
    work = Work(problem)
    tuner = Tuner(backend=cuda, rule=QUICK, cache=None, isolate=False)
    for _ in range(2):
        work.out = call(problem, work.a, work.b, tuner)
        assert work.error() <= 4e-3


# --- alignment -----------------------------------------------------------------------


@everywhere
@layouts
def test_hostile_alignments(layout, direction, cuda):
    """A slice x[1:] of odd half-precision images: two bytes are all that is sure."""
    problem = conv_problem(
        (6, 3, 7, 5), (5, 3, 3, 3), direction, dtype="float16", layout=layout
    )
    for lead in (1, 3, 4):
        work = Work(problem, lead)
        assert work.a.data.ptr % ALIGNMENT == 2 * lead
        ran = 0
        for name, nbytes in cuda.conv.algorithms(problem):
            _, workspace = guarded(nbytes)
            try:
                cuda.conv.run(problem, name, work.a, work.b, work.fresh(), workspace)
            except MucudnnError:
                continue  # it needs more
            assert work.error() <= 5e-2, name
            ran += 1
        assert ran
        tuner = Tuner(backend=cuda, rule=QUICK, cache=None, isolate=False)
        call(problem, work.a, work.b, tuner, out=work.fresh())
        assert work.error() <= 5e-2


def test_odd_images_are_not_divided_where_it_would_misalign(cuda):
    problem = conv_problem((16, 1, 7, 5), (3, 1, 3, 3), dtype="float16")
    table = Tuner(backend=cuda, rule=QUICK, cache=None, isolate=False).measure(problem)
    assert table.batches() == (8, 16)


# --- graphs, streams, threads --------------------------------------------------------


@everywhere
@accumulating
def test_a_replayed_plan_computes_the_same(accumulate, direction, cuda):
    problem = ConvProblem(direction=direction, **CASES["five"]).with_batch(8)
    algo = next(
        name
        for name, _ in cuda.conv.algorithms(problem)
        if cuda.conv.traits(problem, name).deterministic
        and name in dict(cuda.conv.algorithms(problem.with_batch(4)))
    )
    plan = plan_of(cuda, problem, (algo, 4), (algo, 4))
    work = Work(problem)
    workspace = cuda.device.allocate(plan.workspace)
    results = []
    for replay in (False, True):
        runner = cuda.bind(plan, replay=replay)
        for _ in range(4):
            runner.run(work.a, work.b, work.fresh(), workspace, accumulate)
            results.append(work.out.tobytes())
    assert len({*results}) == 1
    assert work.error(accumulate) <= 4e-3


def test_a_replayed_half_precision_sum_computes_the_same(cuda):
    problem = ConvProblem(
        direction=Direction.BACKWARD_FILTER, dtype="float16", **CASES["padded"]
    ).with_batch(8)
    algo = next(n for n in common(cuda, problem, {4}, 500) if n.endswith("+f32"))
    plan = plan_of(cuda, problem, (algo, 4), (algo, 4))
    work = Work(problem)
    workspace = cuda.device.allocate(plan.workspace)
    runner = cuda.bind(plan, replay=True)
    for _ in range(4):
        runner.run(work.a, work.b, work.fresh(), workspace, True)
        assert work.error(accumulate=True) <= 5e-3


def test_streams_have_workspaces_of_their_own(cuda):
    import cupy

    tuner = Tuner(
        backend=cuda, rule=QUICK, cache=None, isolate=False, workspace_limit=4 * MIB
    )
    problem = ConvProblem(direction=Direction.FORWARD, **CASES["five"]).with_batch(32)
    works = [Work(problem) for _ in range(2)]
    ready = tuner.compiled(problem)
    cupy.cuda.get_current_stream().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in works]
    buffers = []
    for _ in range(20):
        for stream, work in zip(streams, works, strict=True):
            with stream:
                ready(work.a, work.b, work.out, False)
                buffers.append(tuner._arena.get(ready.plan.workspace).data.ptr)
    for stream in streams:
        stream.synchronize()
    if ready.plan.workspace:
        assert len({*buffers}) == 2
    for work in works:
        assert work.error() <= 4e-3


@pytest.mark.parametrize("own_streams", [False, True])
def test_threads_share_a_tuner(own_streams, cuda):
    import cupy

    tuner = Tuner(backend=cuda, rule=QUICK, cache=None, isolate=False)
    problem = ConvProblem(direction=Direction.BACKWARD_FILTER, **CASES["padded"])
    works = [Work(problem.with_batch(n)) for n in (5, 7)]
    cupy.cuda.get_current_stream().synchronize()

    def body(work):
        stream = cupy.cuda.Stream.null
        if own_streams:
            stream = cupy.cuda.Stream(non_blocking=True)
        with cupy.cuda.Device(cuda.index), stream:
            for _ in range(20):
                call(work.problem, work.a, work.b, tuner, out=work.out)
            stream.synchronize()

    with ThreadPoolExecutor(len(works)) as pool:
        list(pool.map(body, works, timeout=300))
    for work in works:
        assert work.error() <= 4e-3


def test_plans_outlive_the_thread_that_built_them(cuda):
    """Its handle is destroyed with it."""
    problem = ConvProblem(direction=Direction.FORWARD, **CASES["odd"])
    work = Work(problem)
    fresh = get_backend("cuda")
    plan = plan_of(fresh, problem, (fresh.conv.algorithms(problem)[0][0], 3))
    workspace = fresh.device.allocate(plan.workspace)
    runner = fresh.bind(plan)

    def run():
        runner.run(work.a, work.b, work.out, workspace, False)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    run()
    assert work.error() <= 4e-3


# --- tuning --------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("isolate", [True, False])
def test_tuning_end_to_end(isolate, direction, cuda):
    problem = conv_problem((32, 64, 27, 27), (96, 64, 5, 5), direction, padding=2)
    tuner = Tuner(
        backend="cuda", rule=QUICK, cache=None, isolate=isolate, workspace_limit=8 * MIB
    )
    try:
        table = tuner.measure(problem)
        assert table.batches() == (1, 2, 4, 8, 16, 32)
        (plan,) = tuner.plan([problem])
        assert plan.workspace <= 8 * MIB
        ready, work = tuner.adopt(plan), Work(problem)
        for accumulate in (False, True):
            ready(work.a, work.b, work.fresh(), accumulate)
            assert work.error(accumulate) <= 4e-3
        assert tuner.explain(plan)
    finally:
        tuner.close()


def test_no_memory_while_tuning_is_a_failed_row(cuda):
    import cupy

    problem = conv_problem((64, 64, 56, 56), (64, 64, 3, 3), padding=1)
    workspaces = [nbytes for _, nbytes in cuda.conv.algorithms(problem)]
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    operands = sum(spec.nbytes for spec in problem.operands())
    pool.set_limit(size=pool.total_bytes() + operands + max(workspaces) // 2)
    try:
        tuner = Tuner(
            backend=cuda,
            rule=QUICK,
            cache=None,
            isolate=False,
            batch_policy="undivided",
        )
        table = tuner.measure(problem)
        short = [p for p in table.perfs if p.error and "no room for" in p.error]
        assert short
        assert table.usable
        with pytest.raises(OutOfMemoryError, match="no room for"):
            cuda.device.allocate(operands + max(workspaces))
    finally:
        pool.set_limit(size=0)


def test_memory_that_runs_short_later_gives_a_smaller_plan(cuda, caplog):
    problem = conv_problem((32, 64, 27, 27), (96, 64, 5, 5), padding=2)
    tight = Tight(cuda.device, 1 << 40)
    backend = dataclasses.replace(cuda, device=tight)
    tuner = Tuner(backend=backend, rule=QUICK, cache=None, isolate=False)
    tuner.measure(problem)
    hungry = max(tuner.measure(problem).usable, key=lambda p: (p.batch, p.workspace))
    ready = tuner.adopt(ConvPlan(problem, (hungry,)))
    work = Work(problem)
    tight.most = hungry.workspace - 1
    ready(work.a, work.b, work.out, False)
    assert work.error() <= 4e-3
    assert ready.plan.workspace < hungry.workspace
    assert "falling back" in caplog.text


def test_plans_are_restored_from_text(tmp_path, cuda):
    problem = ConvProblem(direction=Direction.FORWARD, **CASES["padded"])
    name = next(n for n, _ in cuda.conv.algorithms(problem) if n.startswith("eng"))
    for _ in range(2):
        with BenchmarkCache(tmp_path / "cache.sqlite") as cache:
            backend = get_backend("cuda")
            plan = plan_of(cuda, problem, (name, problem.batch))
            ready = Tuner(backend=backend, cache=cache).adopt(plan)
            device = backend.device.fingerprint
            assert cache.get_plan_text(device, problem, name)
            work = Work(problem)
            ready(work.a, work.b, work.out, False)
            assert work.error() <= 4e-3


# --- sums in float32 -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_sums_are_closer(dtype, cuda):
    problem = conv_problem(
        (64, 8, 16, 16),
        (16, 8, 3, 3),
        Direction.BACKWARD_FILTER,
        padding=1,
        dtype=dtype,
    )
    work = Work(problem)
    suffix = "+f32"
    names = [
        name
        for name in common(cuda, problem, {1}, 500)
        if name + suffix in dict(cuda.conv.algorithms(problem.with_batch(1)))
        and cuda.conv.traits(problem, name).math_mode != DOWN_CONVERT
    ]
    compared = 0
    for name in names[:5]:
        errors = []
        for algo in (name, name + suffix):
            plan = plan_of(cuda, problem, *[(algo, 1)] * 64)
            workspace = cuda.device.allocate(plan.workspace)
            cuda.bind(plan).run(
                work.a, work.b, work.fresh(), workspace, accumulate=False
            )
            errors.append(work.error())
        assert errors[1] < errors[0], name
        compared += 1
    assert compared


# --- the device ----------------------------------------------------------------------


def test_a_described_device_lists_what_the_device_lists(tmp_path, cuda):
    """What is planned without a GPU holds on it."""
    text = describe_device(cuda.conv.session.calls, cuda.index)
    path = tmp_path / "here.json"
    path.write_text(text)
    described = get_backend(f"cuda:{path}")
    for direction in Direction:
        problem = ConvProblem(direction=direction, **CASES["five"])
        here = [r for r in cuda.conv.algorithms(problem) if r[0].startswith("eng")]
        assert described.conv.algorithms(problem) == here


def test_a_described_device_leaves_the_real_one_usable(cuda):
    """Both in one process: the stand-in for the driver must not get in the way."""
    get_backend("cuda:h200")
    problem = ConvProblem(direction=Direction.FORWARD, **CASES["odd"])
    work = Work(problem)
    name, nbytes = cuda.conv.algorithms(problem)[0]
    cuda.conv.run(problem, name, work.a, work.b, work.out, cuda.device.allocate(nbytes))
    assert work.error() <= 4e-2


@pytest.mark.parametrize("dtype", list(NATIVE_TOLERANCE))
def test_random_operands_are_ordinary_numbers(dtype, cuda):
    import cupy

    problem = ConvProblem(direction=Direction.FORWARD, dtype=dtype, **CASES["padded"])
    spec = problem.operands()[0]
    device = cuda.device
    buffer = device.allocate(spec.nbytes)
    device.randomize(device.view(buffer, 0, spec))
    bits = cupy.asnumpy(buffer)
    values = loaded(bits.view("uint16" if dtype == "bfloat16" else dtype), dtype)
    assert np.abs(values).max() <= 1
    assert abs(values.mean()) < 0.2
    assert values.std() > 0.4


def test_time_is_that_of_the_kernels_and_not_of_their_launch(cuda):
    import cupy

    device = cuda.device
    zeros = cupy.zeros(1 << 26, "float32")
    for array in (zeros, zeros[:1]):
        array += 1
    start = device.begin()
    zeros += 1
    large = device.elapsed_ms(start, device.record())
    start = device.begin()
    small = device.elapsed_ms(start, device.record())
    assert 0 <= small < large
