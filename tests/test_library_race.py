"""Our kernel of a node against a library's: which is taken, and what becomes of it."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from bench.gpu import kernels as sections
from bench.gpu.job import Job
from mucudnn.backends.base import Kernel
from mucudnn.backends.cuda.cudnn_kernels import OPERATIONS
from mucudnn.errors import BackendError
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.operations import LIBRARY, with_library
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.measured_choices import KernelRaces
from mucudnn.runtime.training.trainer import Trainer
from tests.cuda_emulator import COMPILER
from tests.doubles import Timer
from tests.one_algorithm import one_algorithm
from tests.test_cuda_training import stand_in
from tests.training_cases import SHAPE, examples, tuner_of

emulated = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")


def network(batch, training=True):
    """Windows over images whose gradients are wanted, and a normalisation alone."""
    g = GraphBuilder(training=training, seed=5)
    x = g.conv(g.input("image", (batch, *SHAPE)), 4, 3, padding=1)
    x = g.batch_norm(g.lrn(g.avg_pool(x, 3, 1, 1)))
    x = g.max_pool(g.avg_pool(x, 2, count_include_pad=False), 2)
    logits = g.linear(g.flatten(x), 3)
    label = g.input("label", (batch,), "int64")
    return g.build(g.softmax_cross_entropy(logits, label), g.accuracy(logits, label))


class Library:
    """Computes what it offers as ours does, but in another time than 1 ms."""

    name = "other"

    def __init__(self, ops, ms, refuses=False):
        self.ops, self.ms, self.refuses, self.asked = ops, ms, refuses, []
        self.times_ms = {}

    def offers(self, graph, node):
        return node.op in self.ops and not (self.refuses and self.asked)


def backend_of(library):
    """The CPU beside such a library, its clock a made-up one."""
    cpu = one_algorithm()
    timer = Timer(cpu.device)

    def timed(op, own):
        def run(inputs, outputs, attrs, workspace):
            theirs = LIBRARY in attrs
            if theirs:
                library.asked.append(op)
            timer.now += library.ms if theirs else 1.0
            own.run(inputs, outputs, attrs, workspace)

        return Kernel(run, own.workspace)

    both = {op: timed(op, cpu.kernels[op]) for op in library.ops}
    kernels = {**cpu.kernels, **both}
    return replace(cpu, device=timer, kernels=kernels, library_kernels=library)


def raced(library, budget=None):
    graph = training_graph(network(4))
    return graph, KernelRaces(tuner_of(backend_of(library)), budget).with_library(graph)


def named(graph):
    return {node.name for node in graph.nodes if node.attrs.get(LIBRARY)}


@pytest.mark.parametrize(("ms", "wins"), [(0.5, True), (1.0, False), (2.0, False)])
def test_the_faster_kernel_is_named(ms, wins):
    ops = {"avg_pool", "avg_pool_grad"}
    before, after = raced(library := Library(ops, ms))
    pools = {node.name for node in before.nodes if node.op in ops}
    assert len(pools) == 4
    assert named(after) == (pools if wins else set())
    assert set(library.asked) == ops
    assert [n.name for n in after.nodes] == [n.name for n in before.nodes]
    assert after.tensors == before.tensors


def test_what_is_alike_is_timed_once():
    """Also by another trainer; what there was no room for is timed by it."""
    library, graph = Library({"avg_pool"}, 0.5), training_graph(network(4))
    backend = backend_of(library)
    small = KernelRaces(tuner_of(backend), MemoryBudget(nbytes=64))
    assert not named(small.with_library(graph))
    assert not library.asked
    first = KernelRaces(tuner_of(backend)).with_library(graph)
    library.ms, count = 2.0, len(library.asked)
    assert named(KernelRaces(tuner_of(backend)).with_library(graph)) == named(first)
    assert named(first)
    assert len(library.asked) == count


def test_without_a_library_a_graph_is_what_it_was():
    graph = training_graph(network(4))
    assert KernelRaces(tuner_of()).with_library(graph) is graph


def test_what_refuses_as_it_is_timed_is_not_named():
    _, after = raced(Library({"avg_pool"}, 0.5, refuses=True))
    assert not named(after)


def test_within_a_budget_what_saves_memory_stays_ours():
    """In place, or by making a result again from statistics."""
    ops = {"lrn", "lrn_grad", "batch_norm", "batch_norm_grad"}
    budget = MemoryBudget(nbytes=1 << 30)
    before, free = raced(Library(ops, 0.5))
    _, tight = raced(Library(ops, 0.5), budget)
    assert {free.by_name[n].op for n in named(free)} == ops
    assert {tight.by_name[n].op for n in named(tight)} == {"lrn"}
    for node in free.nodes:
        if node.name in named(free):
            was = before.by_name[node.name].traits
            assert node.traits == replace(was, overwrites=(), recompute_as=None)
            assert node.recomputable == (node.op != "batch_norm" and was.recomputable)


def test_what_there_is_no_room_to_time_stays_ours():
    _, after = raced(Library({"avg_pool"}, 0.5), MemoryBudget(nbytes=64))
    assert not named(after)


@pytest.mark.parametrize("more", [{}, {"split": 2}, {"split": "height:2"}])
def test_a_trainer_runs_what_was_chosen(more):
    ops = {"avg_pool", "avg_pool_grad", "lrn", "lrn_grad", "batch_norm_eval"}
    images, labels = examples(8)

    def trained(backend):
        made = Trainer(
            network(8),
            network(8, training=False),
            tuner=tuner_of(backend),
            optimizer="momentum",
            **more,
        )
        answers = [float(made.step(images, labels).loss) for _ in range(2)]
        return np.array([*answers, made.predict(images).sum()]), made

    expected, _ = trained(one_algorithm())
    library = Library(ops, 0.5)
    found, made = trained(backend_of(library))
    assert np.array_equal(found, expected)
    assert named(made.graph)
    assert set(library.asked) == ops


def test_a_trace_names_the_library():
    from mucudnn.passes.planning.plan_step import plan_step
    from mucudnn.passes.planning.request import StepRequest
    from mucudnn.report.trace import trace_json
    from mucudnn.runtime.profiling.profiler import profile

    graph = training_graph(network(4))
    chosen = next(n for n in graph.nodes if n.op == "avg_pool")
    nodes = [
        with_library(graph.tensors, n, "cudnn") if n is chosen else n
        for n in graph.nodes
    ]
    graph = replace(graph, nodes=tuple(nodes))
    plan = plan_step(StepRequest(graph, profile(tuner_of(), graph)))
    events = {e["name"]: e for e in json.loads(trace_json(plan))["traceEvents"]}
    assert events[chosen.name]["args"]["library"] == "cudnn"
    assert sum("library" in e.get("args", {}) for e in events.values()) == 1


def test_both_are_timed_on_the_shapes_of_networks(tmp_path, monkeypatch):
    monkeypatch.setattr(sections, "_NETWORKS", ("alexnet", "lenet"))
    library = Library({"avg_pool", "avg_pool_grad", "lrn", "lrn_grad"}, 0.5)
    job = Job(out=tmp_path, backend_name="cpu", ends=time.monotonic() + 600, batch=1)
    vars(job)["backend"] = backend_of(library)
    found = sections.library_kernels(job)
    assert {row["op"] for row in found["rows"]} == set(library.asked)
    assert {row["times_ms"] for row in found["rows"]} == {(1.0, 0.5)}
    assert found["text"] == "other / ours: mean 0.500"
    vars(job)["backend"] = one_algorithm()
    assert "skipped" in sections.library_kernels(job)


# cuDNN's stand-in, within a whole step.


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_step_with_the_librarys_kernels_agrees_with_the_cpus(layout, monkeypatch):
    images, labels = examples(24)

    def losses(backend):
        made = Trainer(
            network(8),
            network(8, training=False),
            tuner=tuner_of(backend),
            optimizer="momentum",
            layout=layout,
        )
        rows = [slice(8 * i, 8 * i + 8) for i in range(3)]
        found = [float(made.step(images[r], labels[r]).loss) for r in rows]
        return np.array([*found, *made.predict(images[:8]).ravel()]), made

    expected, _ = losses("cpu")
    _, gpu = stand_in(monkeypatch)
    library, device = gpu.library_kernels._session.calls, gpu.device
    monkeypatch.setattr(device, "begin", lambda launches=1: len(library.ran))
    monkeypatch.setattr(device, "record", lambda: len(library.ran))
    monkeypatch.setattr(device, "elapsed_ms", lambda a, b: 1.0 if b > a else 2.0)
    found, made = losses(gpu)
    assert np.abs(found - expected).max() < 1e-5
    graphs = made.graph, made._evaluator._graph
    chosen = {g.by_name[name].op for g in graphs for name in named(g)}
    assert chosen == set(OPERATIONS)
    assert set(library.ran) == {made.function for made in OPERATIONS.values()}
    with pytest.raises(BackendError, match="BAD_PARAM"):
        library.call("cudnnPoolingForward", *[None] * 8)
