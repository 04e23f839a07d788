"""What a launch costs the host in a bound step, counted in calls of Python."""

import numpy as np
import pytest

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.optimizers import Adam
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.runtime.executor import Executor
from mucudnn.runtime.executor.tasks import Copies
from mucudnn.runtime.training.parameters import StateStore
from mucudnn.runtime.training.planned_steps import place_steps
from mucudnn.runtime.tuning.tuner import Tuner
from tests.cuda_emulator import COMPILER
from tests.model_cases import random_feeds
from tests.python_calls import python_calls
from tests.test_cuda_training import stand_in

emulated = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")


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
