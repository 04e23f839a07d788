"""What a launch costs the host in a bound step, counted in calls of Python."""

import sys

import pytest

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.optimizers import Adam
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.optimizer_updates import with_updates
from mucudnn.runtime.executor import Executor
from mucudnn.runtime.training.parameters import StateStore
from mucudnn.runtime.training.step.placed_steps import place_steps
from mucudnn.runtime.tuning.tuner import Tuner
from tests.cuda_emulator import COMPILER
from tests.model_cases import random_feeds
from tests.test_cuda_training import stand_in

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")


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


def calls_of_python(work):
    """How many functions written in Python it calls."""
    count = 0

    def watch(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_bound_launch_is_one_call_of_python(tmp_path, monkeypatch):
    launches, calls = [], []
    for depth in (2, 16):
        cupy, gpu = stand_in(monkeypatch, tmp_path)
        executor, feeds = bound(gpu, depth)
        executor.run(feeds)
        launches.append(len(cupy.launched))
        cupy, gpu = stand_in(monkeypatch, tmp_path)
        # Called with a grid, a block and arguments, and no function of Python.
        monkeypatch.setattr(cupy, "RawKernel", lambda *_: slice)
        executor, feeds = bound(gpu, depth)
        executor.run(feeds)
        calls.append(calls_of_python(lambda run=executor.run, f=feeds: run(f)))
    more = launches[1] - launches[0]
    assert more >= 80
    # One a launch, and one a node that takes several.
    assert calls[1] - calls[0] < 1.7 * more
