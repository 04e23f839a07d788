"""Node by node in a small pool: the same bits as with all memory there is."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, strategies as st

from bench.baselines import paged
from bench.baselines.paged import PagedExecutor, least_pool_bytes
from mucudnn.backends import get_backend
from mucudnn.backends.base import Kernel
from mucudnn.errors import BackendError, OutOfMemoryError
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.graph import PERSISTENT
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.liveness import peak_bytes
from mucudnn.runtime.executor.arena import Pool
from mucudnn.runtime.executor.tiers import DiskTier, HostTier
from mucudnn.runtime.training.parameters import StateStore
from tests.examples import examples
from tests.random_graphs import training_graphs
from tests.swapping import Bench, random_network, same
from tests.training_cases import network

MODELS = {
    "lenet": lambda: Bench.of_model("lenet", 4, 16),
    "resnet20": lambda: Bench.of_model("resnet20", 2, 8),
    "densenet40": lambda: Bench.of_model("densenet40", 2, 8),
    "small": lambda: Bench.of(training_graph(network(8, dropout=0.3))),
}


class Poisoned(Pool):
    """A pool whose bytes are NaN before they are written and after they are freed."""

    def allocate(self, name, nbytes):
        super().allocate(name, nbytes)
        self.buffer(name)[...] = 0xFF

    def free(self, name):
        self.buffer(name)[...] = 0xFF
        super().free(name)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setattr(paged, "Pool", Poisoned)


class Case:
    """A bench's graph with as much in place as can be."""

    def __init__(self, bench):
        self.bench = bench
        self.graph = in_place(bench.graph)
        self.plans = bench.plans_of(self.graph)
        self.least = least_pool_bytes(bench.backend, self.graph, self.plans)

    def executor(self, nbytes, backend=None, **options):
        backend = backend or self.bench.backend
        state = StateStore(backend.device, self.graph, seed=1)
        made = PagedExecutor(backend, self.graph, self.plans, state, nbytes, **options)
        return made, state

    def run(self, nbytes, steps=2, **options):
        executor, state = self.executor(nbytes, **options)
        try:
            found = [executor.run(self.bench.feeds(step)) for step in range(steps)]
            assert executor.pool.peak_bytes <= nbytes
            assert executor.pool.reserved_bytes == 0
            return (found, state.save()), executor.statistics
        finally:
            executor.close()


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    return Case(MODELS[request.param]())


@pytest.fixture(scope="module")
def lenet():
    return Case(MODELS["lenet"]())


@pytest.mark.slow
def test_models_compute_the_same_bits_in_any_pool(case):
    bench = case.bench
    expected = bench.run(bench.kept())
    moved = []
    for part in (1, 1.3, 100):
        found, statistics = case.run(int(part * case.least))
        same(found, expected)
        moved.append(statistics.in_bytes + statistics.out_bytes)
    assert moved[0] > 0
    assert moved[0] >= moved[1] >= moved[2] == 0


def test_the_pool_is_never_fuller_than_liveness_says(case):
    kept = case.bench.kept()
    persistent = case.graph.with_role(*PERSISTENT)
    state = sum(-(-spec.nbytes // 512) * 512 for spec in persistent)
    most = peak_bytes(case.graph, kept.workspaces, granularity=512) - state
    executor, _ = case.executor(100 * case.least)
    executor.run(case.bench.feeds())
    assert case.least <= executor.pool.peak_bytes <= most
    executor.close()


def test_one_byte_less_than_the_least_does_not_do(case):
    with pytest.raises(OutOfMemoryError) as error:
        case.executor(case.least - 1)
    assert f"the largest node needs {case.least} bytes" in str(error.value)
    named = str(error.value).split("'")[1]
    node = case.graph.by_name[named]
    for name in node.tensors:
        spec = case.graph.tensors[case.graph.storages[name]]
        persistent = spec.role.value in ("parameter", "state")
        assert persistent or f"{spec.name!r} (" in str(error.value)


@given(st.integers(0, 1 << 16), st.floats(0, 1))
@examples(25, suppress_health_check=list(HealthCheck))
def test_random_networks_compute_the_same_bits(seed, part):
    case = Case(Bench.of(random_network(seed)))
    expected = case.bench.run(case.bench.kept())
    found, _ = case.run(case.least + int(part * case.least))
    same(found, expected)


@given(training_graphs(), st.floats(0, 0.5))
@examples(25, suppress_health_check=list(HealthCheck))
def test_random_graphs_compute_the_same_bits(graph, part):
    case = Case(Bench.of(graph))
    expected = case.bench.run(case.bench.kept(), steps=1)
    found, _ = case.run(case.least + int(part * case.least), steps=1)
    same(found, expected)


def test_gradients_that_are_asked_for_are_returned(lenet):
    graph = training_graph(network(4, norm=False))
    graph = in_place(
        replace(graph, outputs=(*graph.outputs, *graph.gradients.values()))
    )
    bench = lenet.bench
    other = Bench.of(graph)
    plans = other.plans_of(graph)
    state = StateStore(bench.backend.device, graph, seed=1)
    found = []
    for nbytes in (least_pool_bytes(bench.backend, graph, plans), 1 << 20):
        executor = PagedExecutor(bench.backend, graph, plans, state, nbytes)
        found.append(executor.run(other.feeds()))
        executor.close()
    assert set(found[0]) == set(graph.outputs)
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name], err_msg=name)
        assert np.isfinite(array).all()


def test_what_leaves_may_go_to_a_file(lenet, tmp_path):
    expected = lenet.bench.run(lenet.bench.kept())
    tiers = [
        HostTier(lenet.bench.backend.device, 2048),
        DiskTier(1 << 20, tmp_path),
    ]
    found, statistics = lenet.run(lenet.least, host=tiers)
    same(found, expected)
    assert statistics.out_bytes > 2048
    assert tiers[1].view(0, 1 << 20).any()


def test_a_full_host_names_the_node_and_leaves_the_pool_empty(lenet):
    tier = HostTier(lenet.bench.backend.device, 512)
    executor, _ = lenet.executor(lenet.least, host=[tier])
    for _ in range(2):
        with pytest.raises(OutOfMemoryError, match=r"node '.*' \(.*\): no room for '"):
            executor.run(lenet.bench.feeds())
        assert executor.pool.reserved_bytes == 0
    executor.close()


class Failing:
    """A kernel that fails the first times it is called."""

    def __init__(self, kernel, times, error):
        self.left = times
        self.error = error
        self.kernel = kernel

    def run(self, *arguments):
        if self.left:
            self.left -= 1
            raise self.error
        self.kernel.run(*arguments)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (BackendError("lost"), "lost"),
        (OutOfMemoryError("no room"), r"node 'max_pool.*' \(max_pool\): no room"),
        (KeyboardInterrupt(), "^$"),
    ],
)
def test_after_an_error_the_next_run_works(lenet, error, message):
    backend = lenet.bench.backend
    kernel = backend.kernels["max_pool"]
    failing = Failing(kernel, 1, error)
    kernels = {**backend.kernels, "max_pool": Kernel(failing.run, kernel.workspace)}
    expected = lenet.bench.run(lenet.bench.kept(), steps=1)
    executor, state = lenet.executor(lenet.least, replace(backend, kernels=kernels))
    with pytest.raises(type(error), match=message):
        executor.run(lenet.bench.feeds())
    assert executor.pool.reserved_bytes == 0
    same(([executor.run(lenet.bench.feeds())], state.save()), expected)
    executor.close()


def test_inputs_are_checked_before_anything_runs(lenet):
    executor, _ = lenet.executor(lenet.least)
    feeds = lenet.bench.feeds()
    with pytest.raises(ValueError, match="input 'image' was not given"):
        executor.run({k: v for k, v in feeds.items() if k != "image"})
    with pytest.raises(ValueError, match="input 'image' must be float32"):
        executor.run(feeds | {"image": feeds["image"][1:]})
    assert executor.pool.peak_bytes == 0
    executor.close()
    with pytest.raises(ValueError, match="the pool was closed"):
        executor.run(feeds)


def test_an_input_may_be_an_output():
    g = GraphBuilder()
    x = g.input("x", (3, 4))
    graph = g.build(g.relu(x))
    graph = replace(graph, outputs=(*graph.outputs, "x"))
    value = np.linspace(-1, 1, 12, dtype="f4").reshape(3, 4)
    executor = PagedExecutor(get_backend("cpu"), graph, {}, {}, 1024, host=[])
    found = executor.run({"x": value})
    np.testing.assert_array_equal(found["x"], value)
    np.testing.assert_array_equal(found[graph.outputs[0]], np.maximum(value, 0))
    executor.close()


def test_it_runs_on_a_device_without_memory(monkeypatch):
    monkeypatch.setattr(paged, "Pool", Pool)
    case = Case(Bench.of_model("resnet20", 2, 8, backend=get_backend("null")))
    found, statistics = case.run(case.least)
    assert found[0][0].keys() == set(case.graph.outputs)
    assert statistics.evictions > 0
