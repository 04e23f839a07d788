"""What nodes take: the CPU's meter beside known calls, the GPU's beside a stand-in."""

import threading
import time

import pytest
import torch

from mucudnn.torch.costs import measure, meters, meters as cuda_meter
from mucudnn.torch.costs.meters import CpuMeter, CudaMeter, meter_of
from mucudnn.torch.execution.copies import ThreadCopies
from tests.torch_steps import build, planner_of

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*profiling.*")]


@pytest.fixture(autouse=True)
def links_measured_once():
    """Here they are measured whenever they are asked for."""


def test_bytes_of_calls_are_those_that_they_allocate():
    def three():
        x = torch.zeros(1000, dtype=torch.uint8)

        def call():
            first = x.clone()  # 1000
            second = first.clone()  # 2000
            del first
            return second.clone(), second  # 2000 again

        return call

    def nothing():
        x = torch.zeros(8)
        return lambda: x.view(2, 4)

    def large():
        return lambda: torch.zeros(1 << 20, dtype=torch.uint8)

    assert CpuMeter().most_bytes([three, nothing, large]) == [2000, 0, 1 << 20]


def test_measuring_bytes_writes_nothing_and_may_be_profiled(capfd):
    def prepared():
        x = torch.zeros(250)
        return x.clone

    assert CpuMeter().most_bytes([prepared]) == [1000]
    assert capfd.readouterr() == ("", "")
    with torch.autograd.profiler.profile(use_kineto=True):
        assert CpuMeter().most_bytes([prepared]) == [1000]


@pytest.mark.usefixtures("one_thread")
def test_times_are_of_the_call_itself():
    x = torch.randn(200, 200)
    meter = meter_of(torch.device("cpu"))
    assert isinstance(meter, CpuMeter)
    once = meter.time_ms(lambda: x @ x)
    many = meter.time_ms(lambda: [x @ x for _ in range(200)])
    assert 0 < once < many


@pytest.mark.usefixtures("one_thread")
def test_waiting_for_the_core_is_no_part_of_a_time():
    def call():
        time.sleep(0.02)  # as if another process had it

    assert CpuMeter().time_ms(call) < 10
    torch.set_num_threads(2)  # whose times one thread's does not tell
    assert CpuMeter().time_ms(call) >= 20


@pytest.fixture
def by_the_clock(one_thread, monkeypatch):
    """Work takes as long as it says, copies in another thread as long as they take."""
    main, worked = threading.current_thread(), 0.0

    def now():
        here = threading.current_thread() is main
        return worked if here else time.perf_counter()

    def work(seconds):
        nonlocal worked
        worked += seconds
        time.sleep(seconds)

    monkeypatch.setattr(meters, "_clock", lambda: now)
    return work


def copying():
    return any("(copy)" in thread.name for thread in threading.enumerate())


def test_what_a_copy_takes_from_a_call_beside_it_is_the_copys(by_the_clock):
    def call():
        by_the_clock(0.06 if copying() else 0.02)

    found = CpuMeter().links(lambda: call)
    assert found.out_bytes_per_ms > 0
    assert found.in_bytes_per_ms > 0
    assert 0 < found.copy_share <= 1  # of copies all the time: 40 ms of 60 or more
    assert not copying()
    apart = CpuMeter().links(lambda: lambda: by_the_clock(0.04))
    assert apart.copy_share == 0


@pytest.mark.usefixtures("one_thread")
def test_what_every_copy_takes_to_be_handed_over_is_measured(monkeypatch):
    def links():
        return CpuMeter().links(lambda: lambda: time.sleep(0.001))

    before = links().copy_overhead_ms
    began = ThreadCopies.offload

    def slower(*args):
        until = time.thread_time() + 0.004
        while time.thread_time() < until:
            pass
        return began(*args)

    monkeypatch.setattr(ThreadCopies, "offload", slower)
    found = links()
    assert 0 <= before < found.copy_overhead_ms
    assert 1.5 < found.copy_overhead_ms < 4  # of two copies, one 4 ms slower


def test_copies_beside_a_long_call_are_few():
    calls = []

    def call():
        calls.append(time.sleep(0.15))

    CpuMeter().links(lambda: call)
    assert len(calls) <= 1 + 2 * 5


class Gpu:
    """A device on which every call takes a time and bytes that are told."""

    def __init__(self):
        self.now = 0.0
        self.bytes = 100
        self.peak = 100
        self.synchronized = 0

    def compute(self, ms, nbytes=0, kept=0):
        self.now += ms
        self.peak = max(self.peak, self.bytes + nbytes)
        self.bytes += kept

    def current_stream(self, device):
        return "stream"

    def Event(self, enable_timing=False):  # noqa: N802  (its name there)
        assert enable_timing
        return _Event(self)

    def synchronize(self, device):
        self.synchronized += 1

    def reset_peak_memory_stats(self, device):
        self.peak = self.bytes

    def memory_stats(self, device):
        return {cuda_meter._CURRENT: self.bytes, cuda_meter._PEAK: self.peak}


class _Event:
    def __init__(self, gpu):
        self._gpu = gpu
        self.at = None
        self._done = False

    def record(self, stream):
        assert stream == "stream"
        self.at = self._gpu.now

    def synchronize(self):
        self._done = True

    def elapsed_time(self, other):
        assert other._done, "the device may not be there yet"
        return other.at - self.at


@pytest.mark.parametrize("ms", [0.25, 100.0])
def test_a_gpu_is_timed_by_events(ms):
    gpu = Gpu()
    calls = []

    def call():
        calls.append(1)
        gpu.compute(ms)

    assert CudaMeter(torch.device("cuda", 0), gpu).time_ms(call) == ms
    assert len(calls) == (1 if ms > 5 else 1 + 3 * 8)  # long ones but once


def test_bytes_of_a_gpu_are_what_is_asked_for_beyond_what_was_there():
    gpu = Gpu()

    def prepared(nbytes):
        def make():
            gpu.compute(0, 5000, 0)  # operands, which are not counted
            return lambda: gpu.compute(1, nbytes, 10)

        return make

    device = torch.device("cuda", 0)
    assert type(meter_of(device)) is CudaMeter
    meter = CudaMeter(device, gpu)
    assert meter.most_bytes([prepared(70), prepared(30)]) == [70, 30]
    assert gpu.synchronized == 2
    text = torch.cuda.memory.memory_stats.__doc__  # the statistics that are read
    assert "requested_bytes.{all,large_pool,small_pool}.{current,peak" in text


def test_a_node_that_changes_a_tensor_is_timed_writing_into_it(monkeypatch):
    model, loss_fn, batch = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    timed = []

    class Meter(CpuMeter):
        def time_ms(self, call):
            result = call()
            if isinstance(getattr(call, "args", None), tuple) and len(result) == 1:
                given = {t.data_ptr() for t in call.args[1]}
                timed.append((call.args[0].function, result[0].data_ptr() in given))
            return super().time_ms(call)

    monkeypatch.setattr(measure, "meter_of", lambda device: Meter())
    planner, _ = planner_of(model, loss_fn, optimizer, batch)
    calls, nodes = planner.lowered.calls, planner.lowered.graph.nodes
    into = {calls[n.name].into for n in nodes if n.mutates and n.outputs}
    assert into
    assert None not in into
    assert {function for function, there in timed if there} >= into
