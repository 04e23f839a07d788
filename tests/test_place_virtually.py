"""Steps in mapped memory: nothing overlaps, budgets are kept, bits are the same."""

import itertools
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from mucudnn.backends import get_backend
from mucudnn.backends.cpu.mapped_memory import CpuMapper
from mucudnn.errors import BackendError, UnsupportedError
from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.profile import ChunkCosts
from mucudnn.ir.schedule import Compute
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import rounded
from mucudnn.passes.placement.layout import PageTable, lay_out, lives_of
from mucudnn.passes.placement.paging import place_virtually
from mucudnn.passes.planning.place_step import place_step
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step
from mucudnn.passes.planning.request import StepRequest
from tests.race_detector import RaceDetector
from tests.swapping import Bench, same

PAGE = 4096
CHUNKS = ChunkCosts(PAGE, map_ms=0.5)


@pytest.fixture(scope="module")
def bench():
    backend = get_backend("cpu")
    available = backend.device.available_bytes
    backend = replace(backend, mapper=CpuMapper(available, PAGE))
    made = Bench.of_model("resnet20", 2, 16, backend=backend)
    made.profile = replace(made.profile, mapping_costs=CHUNKS)
    return made


def check(placed):
    """No byte has two owners at once, all of them are in the memory that is counted."""
    schedule, layout = placed.schedule, placed.layout
    pages = layout.pages or PageTable(max(1, layout.nbytes), (0,))
    places = defaultdict(list)
    lives = lives_of(schedule)
    for name, spans in lives.items():
        nbytes = rounded(schedule.graph.tensors[name].nbytes)
        assert len(layout.offsets[name]) == len(spans)
        for offset, span in zip(layout.offsets[name], spans, strict=True):
            places[span] += pages.extents(offset, offset + nbytes)
        if name in schedule.live_across:
            assert layout.offsets[name][0] == layout.offsets[name][-1]
    for at, instruction in enumerate(schedule.instructions):
        if not isinstance(instruction, Compute):
            continue
        now = [
            e for (first, last), es in places.items() if first <= at <= last for e in es
        ]
        node = instruction.node
        if nbytes := schedule.workspaces.get(node, 0):
            offset = layout.workspace_offsets[node]
            now += pages.extents(offset, offset + nbytes)
        for one, other in itertools.pairwise(
            sorted(e for e in now if e.stop > e.start)
        ):
            assert one.stop <= other.start
        assert all(e.stop <= layout.nbytes for e in now)
    for name, plan in placed.plans.items():
        assert plan.workspace <= schedule.workspaces.get(name, 0)


def tight(plan, chunk_bytes=PAGE):
    """A step in an arena that is little larger than what is in use at once."""
    least = plan.peak_bytes - plan.state_bytes
    sizes = (rounded(least + s * least // 50, chunk_bytes) for s in itertools.count())
    found = (place_virtually(plan, nbytes) for nbytes in sizes)
    return next(placed for placed in found if placed is not None)


def with_chunks(plan):
    profile = replace(plan.profile, mapping_costs=CHUNKS)
    return replace(plan, prediction=replace(plan.prediction, profile=profile))


@pytest.mark.parametrize("seed", range(6))
def test_any_step_in_pieces_computes_the_same_bits(bench, seed):
    expected = bench.run(bench.kept(), watcher=RaceDetector())
    plan = bench.plan(bench.random_residency(seed), part=0.1 * seed)
    placed = tight(with_chunks(plan))
    check(placed)
    assert placed.layout.fragmentation < 0.15
    found = bench.run(plan.schedule, layout=placed.layout, watcher=RaceDetector())
    same(found, expected)


@pytest.mark.parametrize("seed", range(3))
def test_chunks_may_be_anywhere(bench, seed):
    """Every chunk of a static layout elsewhere: all that is left in order are pages."""
    plan = bench.plan(bench.random_residency(seed), part=0.3)
    layout = lay_out(plan.schedule)
    count = -(-layout.nbytes // PAGE)
    chunks = tuple(map(int, np.random.default_rng(seed).permutation(count)))
    layout = replace(layout, nbytes=count * PAGE, pages=PageTable(PAGE, chunks))
    expected = bench.run(plan.schedule)
    found = bench.run(plan.schedule, layout=layout, watcher=RaceDetector())
    same(found, expected)


def test_where_offsets_alone_need_more_memory_it_needs_less():
    graph = with_updates(training_graph(get_model("alexnet")(64)), Momentum())
    costs = ChunkCosts(64 << 10, map_ms=0.5)
    profile = replace(estimate(graph, "p100"), mapping_costs=costs)
    request = StepRequest(graph, profile, policy="lru")
    plan = plan_step(request.within(minimum_budget(request)))
    placed = tight(plan, costs.nbytes)
    check(placed)
    layout = placed.layout
    assert layout.fragmentation < 0.001
    assert lay_out(plan.schedule).fragmentation > 0.05
    assert layout.nbytes % costs.nbytes == 0
    assert placed.map_ms == 0.5 * len(layout.pages.chunks)


@pytest.mark.parametrize(
    ("policy", "share"),
    [("lru", 0.0), ("lru", 0.3), pytest.param("planned", 0.02, marks=pytest.mark.slow)],
)
def test_a_request_may_ask_for_it(policy, share):
    graph = with_updates(training_graph(get_model("alexnet")(32)), Momentum())
    costs = estimate(graph, "p100")
    profile = replace(costs, mapping_costs=ChunkCosts(64 << 10, map_ms=0.01))
    static = StepRequest(graph, profile, policy=policy)
    least = minimum_budget(static)
    most = place_step(static).nbytes
    static = static.within(1.02 * least + share * (most - least))
    virtual = replace(static, placement="virtual")
    placed = place_step(virtual)
    check(placed)
    assert placed.nbytes <= virtual.budget
    asked = placed.plan.prediction.step_ms
    assert asked <= 1.01 * place_step(static).plan.prediction.step_ms
    assert place_step(virtual.within(float("inf"))).nbytes <= most


def test_what_cannot_be_mapped_is_refused(bench):
    graph = training_graph(get_model("lenet")(2))
    profile = estimate(graph, "p100")
    with pytest.raises(ValueError, match="'dynamic'; choose one of: static, virtual"):
        StepRequest(graph, profile, placement="dynamic")
    cannot = replace(profile, mapping_costs=None)
    with pytest.raises(ValueError, match="virtual placement needs a device"):
        StepRequest(graph, cannot, placement="virtual")
    plan = with_chunks(bench.plan(bench.random_residency(0), part=0.0))
    layout = tight(plan).layout
    for mapper in (None, CpuMapper(lambda: 1 << 40, 3 * PAGE)):
        other = replace(bench, backend=replace(bench.backend, mapper=mapper))
        with pytest.raises(UnsupportedError, match=f"in chunks of {PAGE} bytes, and b"):
            other.executor(plan.schedule, layout=layout)
    assert place_virtually(plan, 0) is None


def test_another_process_is_refused(bench, monkeypatch):
    plan = with_chunks(bench.plan(bench.random_residency(0), part=0.0))
    executor, _ = bench.executor(plan.schedule, layout=tight(plan).layout)
    executor.run(bench.feeds())
    monkeypatch.setattr("os.getpid", lambda: 1)
    with pytest.raises(BackendError, match="not in its forks"):
        executor.run(bench.feeds())
