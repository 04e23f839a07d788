"""Profiles: of every node, within a size, and the same where there is room."""

import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from mucudnn.backends import Backend, get_backend
from mucudnn.backends.cpu.conv import CpuConv
from mucudnn.backends.cpu.device import CpuDevice
from mucudnn.backends.cpu.kernels import bind
from mucudnn.backends.cpu.threads import Workers
from mucudnn.backends.null import NullConv, NullKernels
from mucudnn.backends.virtual import VirtualArray, VirtualDevice
from mucudnn.errors import OutOfMemoryError, PlanningError
from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.updates import with_updates
from mucudnn.runtime.profiling import links
from mucudnn.runtime.profiling.links import (
    EVICTING_BYTES,
    LINK_BYTES,
    ColdBench,
    cold_bench,
)
from mucudnn.runtime.profiling.profiler import profile, refine
from mucudnn.runtime.training.sizes import WorkingSet, kernel_workspaces
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner
from tests.doubles import QUICK

MIB = 1 << 20


@pytest.fixture(autouse=True)
def as_much_memory_as_users_have(monkeypatch):
    monkeypatch.setattr(links, "EVICTING_BYTES", EVICTING_BYTES)
    monkeypatch.setattr(links, "LINK_BYTES", LINK_BYTES)
    monkeypatch.setattr(ColdBench.link, "__defaults__", (LINK_BYTES,))


class Counted(CpuDevice):
    """The CPU; counts the bytes that are allocated and not given back.

    Args:
        room: It has no more.
    """

    def __init__(self, room=math.inf):
        self.held = self.most = 0
        self.room = room

    def allocate(self, nbytes):
        if self.held + nbytes > self.room:
            raise OutOfMemoryError(f"no room for {nbytes} bytes")
        buffer = super().allocate(nbytes)
        self.held += nbytes
        self.most = max(self.most, self.held)
        weakref.finalize(buffer.base, self._freed, nbytes)
        return buffer

    def host(self, nbytes):
        return super().allocate(nbytes)

    def _freed(self, nbytes):
        self.held -= nbytes


def step(name="lenet", batch=4, image=16):
    forward = get_model(name)(batch, image=image, classes=3, training=True)
    return in_place(with_updates(training_graph(forward), Momentum()))


def tuner_of(backend, **options):
    options.setdefault("batch_policy", "undivided")
    return Tuner(backend=backend, rule=QUICK, validate=False, cache=None, **options)


def counted(room=math.inf):
    """One thread: idle ones may hold on to operands until they have other work."""
    workers = Workers(1)
    device = Counted(room)
    return Backend("cpu", device, CpuConv(workers), kernels=bind(workers))


def nodes_that_run(graph):
    return [node for node in graph.nodes if not node.traits.view]


def largest(backend, graph):
    """The node that needs most, and how much."""
    workspaces = kernel_workspaces(backend, graph)
    needs = {
        node.name: WorkingSet.of_node(graph, node, workspaces.get(node.name, 0))
        for node in nodes_that_run(graph)
    }
    name = max(needs, key=lambda name: needs[name].pool_bytes)
    return graph.by_name[name], needs[name].pool_bytes


GRAPH = step()


@pytest.mark.parametrize("more", [0, 1, 4096, 100_000, 8 * MIB, 200 * MIB, None])
def test_profiling_takes_no_more_than_it_was_given(more):
    backend = counted()
    memory = None if more is None else largest(backend, GRAPH)[1] + more
    found = profile(tuner_of(backend), GRAPH, rule=QUICK, memory=memory)
    if memory is None:  # there is room for the caches
        assert backend.device.most > EVICTING_BYTES
    else:
        assert backend.device.most <= memory
        for front in found.fronts.values():
            for plan in front:
                assert WorkingSet.of_plan(plan).pool_bytes <= memory + 4 * 512
    assert backend.device.held == 0
    assert set(found.node_ms) == {node.name for node in GRAPH.nodes}
    assert all(found.node_ms[node.name] > 0 for node in nodes_that_run(GRAPH))
    assert set(found.fronts) == {n.name for n in GRAPH.nodes if n.op == "conv"}
    assert found.out_bytes_per_ms > 0
    assert found.in_bytes_per_ms > 0


def test_a_node_that_does_not_fit_is_named_with_its_tensors():
    backend = counted()
    node, least = largest(backend, GRAPH)
    with pytest.raises(OutOfMemoryError) as error:
        profile(tuner_of(backend), GRAPH, rule=QUICK, memory=least - 1)
    text = str(error.value)
    assert f"node '{node.name}' ({node.op}) cannot be timed within" in text
    assert f"({least - 1} bytes)" in text
    assert text.endswith(f"the minimum is {least} bytes")
    for name in node.tensors:
        assert f"'{GRAPH.storages[name]}' (" in text
    assert backend.device.most == 0


def test_the_tuner_keeps_its_limit_and_gets_it_back():
    backend = counted()
    tuner = tuner_of(backend, memory_limit=50 * MIB)
    profile(tuner, GRAPH, rule=QUICK, memory=2 * MIB)
    assert tuner.memory_limit == 50 * MIB
    assert backend.device.most <= 2 * MIB
    with pytest.raises(OutOfMemoryError):
        profile(tuner, GRAPH, rule=QUICK, memory=100)
    assert tuner.memory_limit == 50 * MIB


def test_threads_that_share_a_tuner_keep_their_own_limits():
    """One profiles with little memory while another profiles with all of it."""
    tuner = tuner_of("null")
    waiting, measured = threading.Event(), threading.Event()
    little = largest(tuner.backend, GRAPH)[1]

    def first(name, done, total):
        if done == 1:
            waiting.set()
            assert measured.wait(300)

    with ThreadPoolExecutor(1) as pool:
        small = pool.submit(
            profile, tuner, GRAPH, rule=QUICK, memory=little, progress=first
        )
        assert waiting.wait(300)
        limits = tuner.memory_limit
        try:
            large = profile(tuner, GRAPH, rule=QUICK)
        finally:
            measured.set()
        small = small.result(300)
    assert limits == tuner.memory_limit == math.inf
    assert large == profile(tuner_of("null"), GRAPH, rule=QUICK)
    assert set(small.fronts) == set(large.fronts)


def test_a_convolution_that_the_tuner_has_no_memory_for_is_named():
    tuner = tuner_of("null", memory_limit=1000)
    with pytest.raises(PlanningError) as error:
        profile(tuner, GRAPH, rule=QUICK)
    text = str(error.value)
    first = next(node for node in GRAPH.nodes if node.op == "conv")
    assert text.startswith(f"node '{first.name}' (conv) has no algorithm: it uses ")
    for name in first.tensors:
        assert f"'{name}' (" in text
    assert "the memory limit is 1000 B" in text


@pytest.mark.parametrize("memory", [None, 2 * MIB, 300 * MIB])
def test_where_times_are_known_any_size_gives_the_same(memory):
    """The null backend's clock says exactly what everything takes."""
    found = profile(tuner_of("null"), GRAPH, rule=QUICK, memory=memory)
    assert found == profile(tuner_of("null"), GRAPH, rule=QUICK)
    assert found.out_bytes_per_ms == found.in_bytes_per_ms == 1 << 24


class Observed(VirtualDevice):
    """A device that remembers how many bytes each upload wrote."""

    def __init__(self):
        super().__init__()
        self.uploads = []

    def upload(self, source, target):
        assert source.shape == target.shape
        self.uploads.append(target.nbytes)


def observed():
    device = Observed()
    backend = Backend("null", device, NullConv(device), kernels=NullKernels(device))
    return backend, device


@pytest.mark.parametrize(("beside", "evicted"), [(0, 0), (700, 700), (MIB, MIB)])
def test_caches_are_evicted_with_what_is_left(beside, evicted):
    backend, device = observed()
    node = next(n for n in GRAPH.nodes if n.op == "max_pool")
    needed = WorkingSet.of_node(GRAPH, node)
    bench = ColdBench(backend, needed.pool_bytes + beside, QUICK)
    bench.node_ms(GRAPH, node, 0)
    assert [n for n in device.uploads if n == evicted] == [evicted] * (evicted > 0)


def test_tensors_workspace_and_evicting_buffer_share_no_bytes():
    backend, device = observed()
    node = next(n for n in GRAPH.nodes if n.op == "max_pool")
    needed = WorkingSet.of_node(GRAPH, node, 1000)
    nbytes = needed.pool_bytes + 700
    views = {}

    def view(buffer, offset, spec):
        views.setdefault(offset, spec.nbytes)
        return Observed.view(device, buffer, offset, spec)

    device.view = view
    bench = ColdBench(backend, nbytes, QUICK)
    bench.node_ms(GRAPH, node, 1000)
    starts = sorted(views)
    assert sorted(views.values()) == sorted([*(s.nbytes for s in needed.tensors), 700])
    for start, behind in zip(starts, [*starts[1:], nbytes], strict=True):
        assert start + views[start] <= behind


def test_memory_that_is_too_small_is_refused_and_serves_less():
    backend, _ = observed()
    node = next(n for n in GRAPH.nodes if n.op == "max_pool")
    nbytes = WorkingSet.of_node(GRAPH, node).pool_bytes - 512
    bench = ColdBench(backend, nbytes, QUICK)
    with pytest.raises(OutOfMemoryError, match="no room for"):
        bench.node_ms(GRAPH, node, 0)
    assert bench.link(nbytes) == (1 << 24, 1 << 24)


def test_a_device_with_less_room_times_what_fits():
    """Plans that the device has no room for beside 64 MiB keep the tuner's times."""
    least = 1000
    for room, expected in (
        (200 * MIB, 100 * MIB + EVICTING_BYTES),
        (150 * MIB, 50 * MIB + EVICTING_BYTES),
        (MIB, least),
    ):
        backend = counted(room)
        sizes = [least, 100 * MIB, 50 * MIB, 10]
        with cold_bench(backend, sizes, None, QUICK) as bench:
            assert backend.device.held == expected
            assert isinstance(bench, ColdBench)
        assert backend.device.held == 0
    with (
        pytest.raises(OutOfMemoryError, match="no room for 1000 bytes"),
        cold_bench(counted(999), [least, MIB], None, QUICK),
    ):
        pass
    for nbytes in (1, 1000, 65 * MIB):
        with cold_bench(get_backend("null"), [0], nbytes, QUICK) as bench:
            assert bench.link() == (1 << 24, 1 << 24)
    with (
        pytest.raises(OutOfMemoryError, match="no bytes"),
        cold_bench(get_backend("null"), [0], 0, QUICK) as bench,
    ):
        bench.link()


def test_every_node_is_told_of_once_convolutions_first():
    told = []
    profile(tuner_of("null"), GRAPH, progress=lambda *one: told.append(one))
    names = [name for name, _, _ in told]
    assert sorted(names) == sorted(node.name for node in GRAPH.nodes)
    assert [done for _, done, _ in told] == list(range(1, len(names) + 1))
    assert {total for _, _, total in told} == {len(names)}
    convolutions = [GRAPH.by_name[name].op == "conv" for name in names]
    assert convolutions == sorted(convolutions, reverse=True)


def test_nodes_that_are_alike_are_timed_once():
    backend, _ = observed()
    runs = []
    kernel = backend.kernels["any"]

    def run(inputs, outputs, attrs, workspace):
        runs.append(1)
        kernel.run(inputs, outputs, attrs, workspace)

    graph = step("resnet20", 2, 8)
    again = [n.recompute_node for n in graph.nodes if n.recompute_node is not None]
    kernels = {n.op: replace(kernel, run=run) for n in (*graph.nodes, *again)}
    once = StoppingRule(min_samples=1, max_samples=1)
    found = profile(tuner_of(replace(backend, kernels=kernels)), graph, rule=once)
    plain = [n for n in nodes_that_run(graph) if n.op != "conv"]
    assert len(runs) % 2 == 0  # a warm-up and a sample each
    assert len(runs) / 2 < len(plain) / 3

    for node in plain:
        specs = [graph.tensors[name] for name in node.tensors]
        nbytes = sum(VirtualArray(spec.shape, spec.dtype).nbytes for spec in specs)
        assert found.node_ms[node.name] == pytest.approx(nbytes / 1e8 + 0.1)
    assert found.recompute_ms.keys() == {node.name for node in again}
    assert all(ms < found.node_ms[node] for node, ms in found.recompute_ms.items())


@pytest.mark.parametrize("more", [-1, 0, 5000, 100 * MIB])
def test_refining_takes_no_more_than_it_was_given_and_leaves_what_does_not_fit(more):
    backend = counted()
    tuner = tuner_of(backend)
    known = profile(tuner, GRAPH, rule=QUICK)
    chosen = [front[-1] for front in known.fronts.values()]
    needs = {plan: WorkingSet.of_plan(plan).pool_bytes for plan in chosen}
    memory = max(needs.values()) + more
    backend.device.most = 0
    times = {}
    found = refine(tuner, known, chosen, times, rule=QUICK, memory=memory)
    assert 0 < backend.device.most <= memory
    assert backend.device.held == 0
    assert len(times) == sum(n <= memory for n in needs.values())
    for plan, ms in times.items():
        assert plan.time_ms == pytest.approx(ms)
        assert any(plan in front for front in found.fronts.values())
    for name, front in known.fronts.items():
        if needs[front[-1]] > memory:
            assert found.fronts[name] == front
            assert found.node_ms[name] == known.node_ms[name]
    again = refine(tuner, found, times, times, rule=QUICK, memory=1)
    assert again == found
