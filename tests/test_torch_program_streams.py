"""A program's copies in CUDA streams are ordered behind, and before, what they must be.

No GPU: a strict stand-in runs every copy as late as it may.
"""

import mmap

import pytest
import torch

from mucudnn.errors import UnsupportedError
from mucudnn.passes.planning.request import plan_residency
from mucudnn.passes.residency import Residency, saved_tensors
from mucudnn.torch.capture.step_tensors import StepParts
from mucudnn.torch.execution import cuda_copies, program
from mucudnn.torch.execution.copies import ThreadCopies
from mucudnn.torch.execution.cuda_copies import StreamCopies
from mucudnn.torch.execution.devices import copies_for, device_of
from mucudnn.torch.execution.program import bind
from mucudnn.torch.lowering.lowered import Layout
from tests.cuda_streams import OrderingError, StandIn
from tests.torch_steps import build, planner_of

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*profiling.*")]

CPU = torch.device("cpu")


def host_bytes(nbytes):
    return torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=torch.uint8)[:nbytes]


@pytest.fixture(scope="module")
def offloading():
    """A step of which every saved tensor leaves, and the losses of three steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model, loss_fn, batch = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    planner, _ = planner_of(model, loss_fn, optimizer, batch)
    graph = planner.lowered.graph
    leave = {saved.name: Residency.OFFLOAD for saved in saved_tensors(graph)}
    plan = plan_residency(planner.request().scheduled("on_demand"), leave)
    segment = bind(planner.lowered, plan.schedule, ThreadCopies(reuse=True))
    assert segment.source.count("copy_back") >= 3
    yield planner.lowered, plan.schedule, steps(segment, StandIn())
    torch.set_num_threads(before)


def steps(segment, cuda):
    model, _, batch = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    parts = StepParts.of(model, optimizer)
    losses = []
    with torch.no_grad(), cuda:
        for _ in range(3):
            [loss] = segment.run([*parts.tensors(), *batch])
            losses.append(loss.item())
    cuda.finish()
    return losses


def in_streams(offloading, cuda, reuse=True):
    lowered, schedule, wanted = offloading
    copies = StreamCopies(CPU, reuse=reuse, cuda=cuda, host_bytes=host_bytes)
    segment = bind(lowered, schedule, copies)
    return steps(segment, cuda), wanted, copies


@pytest.mark.parametrize("reuse", [True, False])
def test_streams_compute_what_threads_do(offloading, reuse):
    cuda = StandIn()
    found, wanted, copies = in_streams(offloading, cuda, reuse)
    assert found == wanted
    assert cuda.copies >= 3 * 6
    assert len(cuda.streams) == 2
    assert not copies._pending


class Deaf(StandIn):
    """A stand-in in which one kind of wait does nothing."""

    def __init__(self, which):
        super().__init__()
        self.which = which

    def Stream(self, device):  # noqa: N802  (its name there)
        stream = super().Stream(device)
        wait = stream.wait_event

        def heard(event):
            of_compute = len(event.clocks) >= 1 and event_of(event) is self.compute
            if (self.which == "compute") != of_compute:
                wait(event)

        stream.wait_event = heard
        return stream


def event_of(event):
    return list(event.clocks)[-1]


@pytest.mark.parametrize("which", ["compute", "copies"])
def test_a_stream_that_does_not_wait_is_noticed(offloading, which):
    with pytest.raises(OrderingError):
        in_streams(offloading, Deaf(which))


def test_a_program_that_does_not_wait_is_noticed(offloading, monkeypatch):
    monkeypatch.setattr(cuda_copies.OffloadedStorage, "wait", lambda stored: None)
    with pytest.raises(OrderingError):
        in_streams(offloading, StandIn())


def test_an_event_of_the_stream_itself_is_no_wait(offloading, monkeypatch):
    def inside(self, stream, target, source, after):
        with self._cuda.stream(stream):  # the mistake: it is the current stream now
            stream.wait_event(self._cuda.current_stream(self._device).record_event())
            if after is not None:
                stream.wait_event(after)
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    monkeypatch.setattr(StreamCopies, "_copy", inside)
    with pytest.raises(OrderingError, match="began before"):
        in_streams(offloading, StandIn())


def test_a_step_that_fails_leaves_no_copy_behind(offloading):
    lowered, schedule, _ = offloading
    cuda = StandIn()
    copies = StreamCopies(CPU, reuse=True, cuda=cuda, host_bytes=host_bytes)
    begun = copies.offload

    def failing(tensor, slot):
        if cuda.copies:
            raise RuntimeError("no memory")
        return begun(tensor, slot)

    copies.offload = failing
    segment = bind(lowered, schedule, copies)
    with pytest.raises(RuntimeError, match="no memory"):
        steps(segment, cuda)
    cuda.finish()
    assert cuda.copies == 1
    assert not copies._pending


def layout(device, *shape):
    return Layout(shape, (1,) * len(shape), torch.float32, 0, torch.device(device))


def test_a_graph_runs_where_its_tensors_are():
    assert device_of({}) == CPU
    assert device_of({"x": layout("cpu", 3)}) == CPU
    mixed = {"x": layout("cuda:1", 3), "rate": layout("cpu"), "step": layout("cpu", 1)}
    assert device_of(mixed) == torch.device("cuda:1")
    with pytest.raises(UnsupportedError, match="y on cpu; a step runs on one"):
        device_of({"x": layout("cuda:0", 3), "y": layout("cpu", 3)})
    with pytest.raises(UnsupportedError, match="x is on cuda:0 and y on cuda:1"):
        device_of({"x": layout("cuda:0", 3), "y": layout("cuda:1")})


def test_copies_follow_the_device():
    assert isinstance(copies_for(CPU, reuse=True), ThreadCopies)
    cuda = torch.device("cuda", 0)
    assert isinstance(copies_for(cuda, reuse=True), StreamCopies)


def test_a_gpu_draws_from_its_own_generator(monkeypatch):
    states = {0: torch.zeros(16, dtype=torch.uint8), 1: torch.ones(16).byte()}
    put = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda d: states[d.index])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda s, d: put.append((s, d)))
    device = torch.device("cuda", 1)
    kept = program.keep_state(device)
    assert torch.equal(kept, states[1])
    states[1].zero_()
    assert int(kept.sum()) == 16  # it has bytes of its own
    program.set_state(kept, device)
    assert put == [(kept, device)]
