"""Convolutions that add a bias and apply a ReLU: by one engine, or by what is there."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from mucudnn.backends import get_backend
from mucudnn.backends.base import Kernel
from mucudnn.backends.cuda.conv import CudaEpilogues
from mucudnn.backends.cuda.conv.graph_api import (
    GraphLibrary,
    PlanKey,
    bias_relu_graph,
    engines,
    operation_graph,
)
from mucudnn.backends.cuda.libcudnn import Status
from mucudnn.errors import MucudnnError
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.conv import AlgoPerf, ConvPlan, Direction
from mucudnn.ir.numerics import DOWN_CONVERT, NATIVE, TF32
from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.tensor import Role
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.fusion import fuse_elementwise
from mucudnn.passes.graph.precision import to_mixed_precision
from mucudnn.passes.graph.training_step import StepRecipe, build_step
from mucudnn.runtime.training.measured_choices import KernelRaces
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.tuner import Tuner
from tests.conv_problems import conv_problem
from tests.cuda_emulator import COMPILER
from tests.cuda_fake import FakeArray, fake_backend
from tests.cuda_work import TOLERANCE, layer, layouts
from tests.cudnn_fake import FakeCudnn
from tests.doubles import Timer
from tests.graphs import split_batch
from tests.one_algorithm import one_algorithm
from tests.reference import operands, reference, relative_error
from tests.test_cuda_training import stand_in
from tests.training_cases import SHAPE, examples, tuner_of

emulated = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")


class Nothing:
    """A library that promises epilogues and then has no engine for any."""

    def __init__(self, asked=None):
        self.asked = [] if asked is None else asked

    def offers(self, problem, bias):
        return True

    def bind(self, plan, x, w, bias, y, scratch):
        self.asked.append(plan.problem)


def network(batch, training=True):
    """Convolutions with biases, of which the last has no ReLU behind it."""
    g = GraphBuilder(training=training)
    x = g.relu(g.conv(g.input("image", (batch, *SHAPE)), 4, 3, padding=1))
    x = g.relu(g.conv(x, 5, 3, padding=1, stride=2))
    x = g.relu(g.conv_transpose(x, 4, 2, stride=2))
    x = g.conv(x, 3, 1)
    logits = g.linear(g.flatten(x), 3)
    label = g.input("label", (batch,), "int64")
    return g.build(g.softmax_cross_entropy(logits, label), g.accuracy(logits, label))


# The pass.


def test_what_a_convolution_takes_in():
    graph = network(4)
    made = fuse_elementwise(graph, Nothing().offers)
    kinds = Counter((node.op, len(node.inputs)) for node in made.nodes)
    assert kinds["conv", 3] == 2
    assert kinds["conv", 2] == 2
    assert kinds["bias_relu", 2] == 1  # of the transposed one
    assert (
        fuse_elementwise(graph, lambda problem, bias: False).nodes
        == fuse_elementwise(graph).nodes
    )
    assert ("conv", 3) not in {
        (n.op, len(n.inputs)) for n in fuse_elementwise(graph).nodes
    }


def test_a_bias_is_cast_only_where_nothing_takes_it_as_it_is():
    """And its gradient is what the update reads: both as those of the filter."""
    graph = to_mixed_precision(network(4), "float16")
    for kinds in (["float16"], ["float32"], ["float16", "float32"]):
        made = fuse_elementwise(graph, lambda problem, bias, kinds=kinds: bias in kinds)
        taken = [n for n in made.nodes if n.op == "conv" and len(n.inputs) == 3]
        assert len(taken) == 2
        expected = "float32" if "float32" in kinds else "float16"
        assert {made.tensors[n.inputs[2]].dtype for n in taken} == {expected}
    made = fuse_elementwise(graph, lambda problem, bias: bias == "float16")
    (step,) = build_step(made, StepRecipe(optimizer=Momentum(), fuse=False)).steps
    assert step.tensors["conv/bias:float16"].role is Role.STATE
    assert step.tensors[step.gradients["conv/bias"]].dtype == "float16"


def test_a_result_that_others_read_stays():
    g = GraphBuilder()
    x = g.conv(g.input("image", (2, 3, 4, 4)), 3, 1, bias=False)
    graph = g.build(g.add(g.relu(g.bias(x)), x))
    assert (
        fuse_elementwise(graph, Nothing().offers).nodes == fuse_elementwise(graph).nodes
    )


# Trainers, without an engine: what stands in for it is what was there before.


def losses(backend, numerics="tf32", **more):
    images, labels = examples(24)
    tuner = tuner_of(backend, numerics=numerics)
    made = Trainer(
        network(8),
        network(8, training=False),
        tuner=tuner,
        optimizer="momentum",
        **more,
    )
    rows = [slice(8 * i, 8 * i + 8) for i in range(3)]
    found = [float(made.step(images[r], labels[r]).loss) for r in rows]
    return np.array([*found, made.predict(images[:5]).sum()]), made


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"split": 2},
        {"split": "height:2"},
        {"gradient_accumulation": 1, "budget": 0.8},
    ],
)
def test_without_an_engine_every_bit_is_as_before(more):
    expected, free = losses("cpu", **{k: v for k, v in more.items() if k != "budget"})
    if "budget" in more:
        more = {**more, "budget": int(free.peak_bytes * more["budget"])}
    nothing = Nothing()
    backend = replace(one_algorithm(), epilogues=nothing)
    found, made = losses(backend, plans=free.plans, **more)
    assert any(n.op == "conv" and len(n.inputs) == 3 for n in made.graph.nodes)
    assert nothing.asked
    assert np.array_equal(found, expected)


def test_nothing_is_fused_where_that_is_not_wanted():
    nothing = Nothing()
    backend = replace(one_algorithm(), epilogues=nothing)
    _, made = losses(backend, fuse=False)
    assert not nothing.asked
    assert "bias_relu" not in {node.op for node in made.graph.nodes}


def test_slices_of_the_batch_take_the_bias_whole():
    step = split_batch(
        training_graph(fuse_elementwise(network(4), Nothing().offers)), 2
    )
    convs = [n for n in step.nodes if n.op == "conv" and len(n.inputs) == 3]
    forward = [n for n in convs if n.attrs["problem"].direction is Direction.FORWARD]
    assert len(forward) == 4
    assert {n.attrs["problem"].batch for n in forward} == {2}


# The library's engines, over its stand-in.


@pytest.fixture
def library():
    return FakeCudnn()


class Work:
    """Operands on the fake device, and what should come out."""

    def __init__(self, library, problem, bias=None, offset=0):
        backend = fake_backend(library)
        self.library, self.problem = library, problem
        self.conv = backend.conv
        self.epilogues = CudaEpilogues(self.conv)
        x, w = operands(problem)
        b = np.linspace(-1, 1, problem.w_shape[0]).astype(bias or problem.dtype)
        self.x, self.w = FakeArray.of(x, offset), FakeArray.of(w)
        self.b, made = FakeArray.of(b), problem.operands()[2]
        self.y = FakeArray.of(np.full(made.shape, np.nan, made.dtype))
        shape = (1, -1, *(1 for _ in problem.stride))
        wide = b.astype("f8").reshape(shape)
        if problem.layout == "NHWC":
            wide = np.moveaxis(wide, 1, -1)
        self.right = np.maximum(reference(problem, x, w) + wide, 0)
        self.scratch = backend.device.allocate(1 << 16)

    def bind(self, *batches, math_mode=NATIVE, workspace=1 << 16):
        row = AlgoPerf(
            algo="", batch=0, time_ms=1.0, workspace=workspace, math_mode=math_mode
        )
        plan = ConvPlan(self.problem, tuple(replace(row, batch=n) for n in batches))
        arrays = self.x, self.w, self.b, self.y, self.scratch[:workspace]
        return self.epilogues.bind(plan, *arrays)

    def agrees(self):
        error = relative_error(self.y.host, self.right)
        return error < TOLERANCE[self.problem.dtype]


@layouts
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_plan_is_one_call_a_micro_batch(dtype, layout, library):
    work = Work(library, layer(8, dtype=dtype, layout=layout))
    call = work.bind(5, 3)
    call()
    call()
    assert work.agrees()
    assert [e.batch for e in library.executions] == [5, 3, 5, 3]
    assert all(len(e.pointers) == 4 for e in library.executions)


def test_a_wide_bias_of_narrow_images_wants_channels_last(library):
    for layout, there in (("NCHW", False), ("NHWC", True)):
        work = Work(library, layer(4, dtype="float16", layout=layout), "float32")
        assert work.epilogues.offers(work.problem, "float32") is there
        call = work.bind(4)
        assert (call is not None) is there
    call()
    assert work.agrees()


def test_the_arithmetic_and_the_workspace_of_the_plan_are_kept(library):
    work = Work(library, layer(8))
    work.bind(8, math_mode=TF32)()
    work.bind(8)()
    assert [e.algo[0] for e in library.executions] == [1, 0]
    assert work.bind(8, math_mode=TF32, workspace=1024) is None
    rows = work.conv.graph_rows(work.problem, "float32")
    assert DOWN_CONVERT in {row.traits.math_mode for row in rows.values()}
    assert work.agrees()


def test_engines_that_cannot_be_had_are_passed_over(library):
    work = Work(library, layer(8), offset=4)  # not aligned as engine 1 wants it
    assert work.bind(8, math_mode=TF32) is None
    work.bind(8)()
    assert work.agrees()
    work = Work(library, layer(8))
    work.b = FakeArray.of(work.b.host, 4)  # nor is the bias
    assert work.bind(8, math_mode=TF32) is None
    work.bind(8)()
    assert work.agrees()
    library.fail("cudnnBackendFinalize", Status.NOT_SUPPORTED, times=10**6)
    work = Work(library, layer(6))
    assert work.bind(6) is None
    assert not work.epilogues.offers(layer(5), "float32")


# The race.


class InOne:
    """A library that does bias and ReLU within a convolution, in so many ms."""

    def __init__(self, timer, ms):
        self.timer, self.ms, self.shapes = timer, ms, []

    def offers(self, problem, bias):
        return bias == "float32"

    def bind(self, plan, x, w, bias, y, scratch):
        self.shapes.append((x.shape, w.shape, bias.shape, y.shape))

        def call():
            self.timer.now += self.ms

        return call


def race(ms, problem, cache=None):
    """One whose convolutions, biases with ReLUs behind and both take 1, 1 and `ms`."""
    cpu = get_backend("cpu")
    timer, kernel = Timer(cpu.device), cpu.kernels["bias_relu"]

    def slow(*arguments):
        timer.now += 1
        kernel.run(*arguments)

    def bound(plan, replay):
        def run(*operands):
            timer.now += 1

        return SimpleNamespace(run=run)

    backend = replace(
        cpu,
        device=timer,
        binder=bound,
        epilogues=InOne(timer, ms),
        kernels={**cpu.kernels, "bias_relu": Kernel(slow, kernel.workspace)},
    )
    row = AlgoPerf(algo="", batch=problem.batch, time_ms=1.0, workspace=64)
    plans = {problem: ConvPlan(problem, (row,))}
    return backend, KernelRaces(Tuner(backend=backend, cache=cache), None, plans)


@layouts
@pytest.mark.parametrize(("ms", "wins"), [(0.5, True), (2.0, True), (2.5, False)])
def test_the_faster_of_one_call_and_two_is_taken(ms, wins, layout):
    problem = layer(3, dtype="float32", layout=layout)
    backend, found = race(ms, problem)
    assert found.epilogue_times(problem, "float32") == (ms, 2)
    assert found.offers_epilogue(problem, "float32") is wins
    asked = len(backend.epilogues.shapes)
    assert found.offers_epilogue(problem, "float32") is wins
    assert not found.offers_epilogue(problem, "float16")
    x, w, y = (spec.shape for spec in problem.operands())
    assert backend.epilogues.shapes == [(x, w, problem.w_shape[:1], y)] * asked
    assert asked == 2


def test_what_is_not_timed_is_what_would_run_anyway():
    problem = layer(3)
    for epilogues, offered in ((None, False), (Nothing(), True)):
        cpu = replace(get_backend("cpu"), epilogues=epilogues)
        tuner = Tuner(backend=cpu, cache=None)
        found = KernelRaces(tuner, None, race(9, problem)[1].plans)
        assert found.offers_epilogue(problem, "float32") is offered


@pytest.mark.parametrize("times", [(1.0, 2.0), (2.0, 1.0), None])
def test_a_trainer_plans_what_has_won(times, monkeypatch):
    monkeypatch.setattr(KernelRaces, "epilogue_times", lambda *_: times)
    expected, _ = losses("cpu")
    found, made = losses(replace(one_algorithm(), epilogues=Nothing()))
    taken = any(n.op == "conv" and len(n.inputs) == 3 for n in made.graph.nodes)
    assert taken is (times != (2.0, 1.0))
    assert np.array_equal(found, expected)


@emulated
@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "apart", "inside"),
    [
        ({}, 1e-5, False),  # a plan without workspace: no engine has so little in TF32
        ({"numerics": "strict"}, 1e-5, True),
        ({"numerics": "strict", "layout": "NHWC"}, 1e-5, True),
        ({"precision": "float16"}, 5e-3, True),
        ({"precision": "float16", "layout": "NHWC"}, 5e-3, True),
        ({"numerics": "strict", "split": 2}, 1e-5, True),
    ],
)
def test_training_on_the_device_agrees(more, apart, inside, monkeypatch):
    monkeypatch.setattr(KernelRaces, "epilogue_times", lambda *_: None)  # by no clock
    expected, _ = losses("cpu")
    _, gpu = stand_in(monkeypatch)
    gpu = replace(gpu, epilogues=CudaEpilogues(gpu.conv))
    found, _ = losses(gpu, **more)
    assert np.abs(found - expected).max() < apart * max(1, abs(expected[-1]))
    done = gpu.conv.session.calls.executions
    assert any(len(e.pointers) == 4 for e in done) is inside


# The real library, for an H200 that is only described.


@pytest.mark.cudnn
@layouts
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_cudnn_has_engines_for_it(dtype, layout, cudnn_library):
    session = get_backend("cuda:h200").conv.session
    problem = conv_problem(
        (32, 64, 56, 56), (64, 64, 3, 3), padding=1, dtype=dtype, layout=layout
    )

    def listed(graph):
        return engines(session, graph, dtype)

    def with_bias(kind):
        return listed(bias_relu_graph(session, problem, kind, alignment=16))

    plain = listed(operation_graph(session, problem, accumulate=False))
    own = with_bias(dtype)
    assert len(plain) > len(own) > 30
    # A bias in float32 beside halves: few engines, and none with channels first.
    wide = with_bias("float32")
    assert bool(wide) is (dtype == "float32" or layout == "NHWC")


@pytest.mark.cudnn
def test_cudnn_builds_its_plans(cudnn_library):
    session = get_backend("cuda:h200").conv.session
    library = GraphLibrary(session)
    problem = layer(8, dtype="float16", layout="NHWC")
    rows = library.rows(problem, "float16")
    compiled = "runtime_compilation"
    name = next(n for n, row in rows.items() if compiled not in row.traits.notes)
    text = library.dumps(PlanKey(problem, name, bias="float16"))
    assert json.loads(text)["cudnnVersion"] // 10000 == 9
    with pytest.raises(MucudnnError):
        library.plan(PlanKey(problem, "eng9999", bias="float16"))
