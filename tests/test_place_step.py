"""Steps placed in an arena within a budget, and plans found before."""

import itertools
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.backends import get_backend
from mucudnn.backends.cpu.mapped_memory import CpuMapper
from mucudnn.errors import BackendError, UnsupportedError
from mucudnn.ir.devices import DEVICES
from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.profile import ChunkCosts
from mucudnn.ir.schedule import STATIC, VIRTUAL, Alloc, Compute, Free
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import ALIGNMENT, rounded
from mucudnn.passes.placement.fit_to_arena import _Arena
from mucudnn.passes.placement.layout import PageTable, lay_out, lives_of
from mucudnn.passes.placement.packing import Shrinkable, place_shrinkable
from mucudnn.passes.placement.paging import place_virtually
from mucudnn.passes.planning import plan_step as step_planning
from mucudnn.passes.planning.place_step import place_step
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step, unbounded
from mucudnn.passes.planning.request import StepRequest, plan_residency
from mucudnn.passes.residency.policies import lru
from mucudnn.passes.scheduling.intervals import ResidencyInterval
from mucudnn.passes.scheduling.schedulers import (
    Clock,
    earliest_ends,
    latest_starts,
    trim_to_copies,
)
from mucudnn.runtime.training import planned_steps
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.planned_steps import place_steps
from mucudnn.runtime.tuning.tuner import Tuner
from tests.doubles import QUICK
from tests.examples import examples
from tests.plain_schedule import keep_all
from tests.race_detector import RaceDetector
from tests.random_graphs import profiles, training_graphs
from tests.schedule_oracle import verify
from tests.swapping import Bench, same

POLICIES = ("planned", "lru")
MODELS = {"resnet18": 4, "googlenet": 2, "densenet40": 4, "alexnet": 4}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == "alexnet" else pytest.mark.slow)
        for name in MODELS
    ],
)
def step(request):
    forward = get_model(request.param)(MODELS[request.param])
    graph = with_updates(training_graph(forward), Momentum(learning_rate=0.1))
    profile = estimate(graph, DEVICES["p100"])
    whole = plan_residency(
        StepRequest(graph, profile, budget=float("inf"), convolutions="fastest"), {}
    )
    least = {p: minimum_budget(StepRequest(graph, profile, policy=p)) for p in POLICIES}
    return graph, profile, least, whole.peak_bytes


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_arena_keeps_the_budget_and_nothing_overlaps(
    step, share, policy, short_search
):
    graph, profile, leasts, most = step
    asked = StepRequest(graph, profile, policy=policy)
    least = leasts[policy]
    budget = int(1.1 * least + share * max(0, most - least))
    placed = place_step(asked.within(budget))
    assert placed.nbytes <= budget
    schedule, layout = placed.plan.schedule, placed.layout
    lives = lives_of(schedule)
    size = {name: rounded(graph_bytes(schedule, name)) for name in lives}
    for at, instruction in enumerate(schedule.instructions):
        if not isinstance(instruction, Compute):
            continue
        taken = [
            (offset, offset + size[name])
            for name, spans in lives.items()
            for offset, (first, last) in zip(layout.offsets[name], spans, strict=True)
            if first <= at <= last
        ]
        name = instruction.node
        if name in layout.workspace_offsets:
            start = layout.workspace_offsets[name]
            taken.append((start, start + schedule.workspaces[name]))
        taken.sort()
        for (_, stop), (start, _) in pairwise(taken):
            assert stop <= start
        assert taken[-1][1] <= layout.nbytes
    for name, plan in placed.plan.plans.items():
        assert plan.workspace <= schedule.workspaces.get(name, 0)


def graph_bytes(schedule, name):
    return schedule.graph.tensors[name].nbytes


def test_a_placed_step_says_what_it_is_in_a_line():
    graph = training_graph(get_model("lenet")(2))
    request = StepRequest(graph, estimate(graph, DEVICES["p100"]), policy="keep_all")
    said = repr(place_step(request))
    assert said.startswith("PlacedStep(")
    assert "StepPlan(keep_all, timed: " in said
    assert said.endswith(" ms, 0 B out, 0 nodes again))")
    assert len(said) < 150


@pytest.fixture(scope="module")
def large():
    """A request without a budget, its peak and the least that it needs."""
    graph = with_updates(training_graph(get_model("alexnet")(256)), Momentum())
    request = StepRequest(graph, estimate(graph, "h200"))
    peak = unbounded(graph, request.profile).peak_bytes
    return request, peak, minimum_budget(request)


@pytest.mark.parametrize(("share", "most"), [(0.5, 1.01), (0.2, 1.01), (0.05, 1.02)])
def test_places_cost_little_time(share, most, large, short_search):
    request, peak, least = large
    request = request.within(least + int(share * (peak - least)))
    plan = plan_step(request)
    static, virtual = (
        place_step(replace(request, placement=name), plan).plan.prediction.step_ms
        for name in (STATIC, VIRTUAL)
    )
    assert virtual <= static <= most * plan.prediction.step_ms


# The road from graphs to what an executor runs, where there is no budget.


def at_nodes(schedule):
    """What is allocated before every node and freed after it, and what never is."""
    found, waiting = [], set()
    for instruction in schedule.instructions:
        match instruction:
            case Compute(node):
                found.append((node, frozenset(waiting), set()))
                waiting = set()
            case Alloc(name):
                waiting.add(name)
            case Free(name):
                found[-1][2].add(name)
    return found, waiting


@examples(60)
@given(data=st.data())
def test_without_a_budget_everything_stays_until_its_last_use(data):
    graph = data.draw(training_graphs(updates=data.draw(st.booleans())))
    profile = data.draw(profiles(graph))
    placed = place_step(StepRequest(graph, profile, policy="keep_all"))
    plain = keep_all(in_place(graph), placed.schedule.workspaces)
    assert placed.schedule.graph == plain.graph
    assert at_nodes(placed.schedule) == at_nodes(plain)
    assert verify(placed.schedule, granularity=ALIGNMENT) == placed.plan.peak_bytes
    assert placed.schedule.hosted == ()


@pytest.mark.parametrize("name", ["lenet", "resnet20", "densenet40"])
def test_training_without_a_budget_measures_nothing(name, monkeypatch):
    def measured(*args, **options):
        raise AssertionError("nothing needs to be measured")

    monkeypatch.setattr(planned_steps, "profile", measured)
    graph = with_updates(training_graph(get_model(name)(2)), Momentum())
    tuner = Tuner(backend="null", rule=QUICK)
    (placed,) = place_steps(tuner, [graph])
    plain = keep_all(in_place(graph), placed.schedule.workspaces)
    assert at_nodes(placed.schedule) == at_nodes(plain)
    assert placed.layout.nbytes == lay_out(plain).nbytes
    convolutions = {node.name for node in graph.nodes if node.op == "conv"}
    assert placed.plans.keys() == convolutions


PERIOD = 12


@st.composite
def shrinkables(draw):
    needed = draw(st.integers(0, PERIOD - 1))
    last = needed + draw(st.integers(0, PERIOD - 2))
    room = PERIOD - 1 - (last - needed)
    before = draw(st.integers(0, room))
    after = draw(st.integers(0, room - before))
    return Shrinkable(
        draw(st.integers(1, 9)), needed - before, needed, last, last + after
    )


def moments(first, last):
    return {at % PERIOD for at in range(first, last + 1)}


def check(blocks, places, limit):
    for i, (block, place) in enumerate(zip(blocks, places, strict=True)):
        assert block.start <= place.start <= block.needed
        assert block.last <= place.stop <= block.stop
        assert 0 <= place.offset <= limit - block.nbytes
        for other, its in zip(blocks[:i], places[:i], strict=True):
            if moments(place.start, place.stop) & moments(its.start, its.stop):
                assert (
                    place.offset + block.nbytes <= its.offset
                    or its.offset + other.nbytes <= place.offset
                )


@given(st.lists(shrinkables(), min_size=1, max_size=14), st.floats(0.3, 1.0))
@examples(50)
def test_places_never_overlap_and_last_at_least_as_long_as_needed(blocks, share):
    everything = sum(block.nbytes for block in blocks)
    limit = int(share * everything)
    clock = Clock([1.0 + at for at in range(PERIOD)])
    found = list(place_shrinkable(blocks, limit, clock))
    for places in found:
        check(blocks, places, limit)
    if limit == everything:
        assert found
        for block, place in zip(blocks, found[0], strict=True):
            assert (place.start, place.stop) == (block.start, block.stop)


def test_what_is_wanted_gives_way_and_what_is_needed_does_not():
    clock = Clock([1.0] * 6)
    intervals, comes_back = Shrinkable(4, 0, 0, 3, 3), Shrinkable(4, 1, 4, 5, 5)
    for places in place_shrinkable([intervals, comes_back], 4, clock):
        assert [(p.offset, p.start, p.stop) for p in places] == [(0, 0, 3), (0, 4, 5)]
    needed = Shrinkable(4, 3, 3, 5, 5)
    assert not list(place_shrinkable([intervals, needed], 4, clock))


def test_copies_back_begin_as_late_as_their_link_admits():
    clock = Clock([1.0] * 10)
    intervals = [
        ResidencyInterval("a", 20, 0, 9, 6, 9, copied_in=True),
        ResidencyInterval("b", 10, 0, 9, 7, 9, copied_in=True),
    ]
    assert latest_starts(intervals, clock, 10.0) == {0: 4, 1: 6}
    out = [
        ResidencyInterval("a", 20, 0, 9, 0, 2, copied_out=True),
        ResidencyInterval("b", 10, 0, 9, 0, 3, copied_out=True),
    ]
    assert earliest_ends(out, clock, 10.0) == {0: 5, 1: 6}


@pytest.mark.parametrize("grows", [True, False])
def test_placements_are_judged_by_the_time_of_the_placed_step(grows):
    graph = with_updates(training_graph(get_model("resnet20")(32)), Momentum())
    free = StepRequest(graph, estimate(graph, "h200"))
    least, most = minimum_budget(free), unbounded(graph, free.profile).peak_bytes
    request = free.within((least + most) // 2)
    plan = plan_residency(request, lru(request))
    nodes = plan.schedule.graph.nodes
    clock = Clock([plan.profile.node_ms[node.name] for node in nodes])
    nbytes = 2 * int(request.budget)
    wanted = trim_to_copies(plan.intervals, clock, free.profile, 0.5)
    arena = _Arena(plan, wanted, nbytes, grows=grows)
    places = next(place_shrinkable(arena.shrinkables, nbytes, clock))
    placed = arena.placed(places)
    assert arena.step_ms(places) == pytest.approx(placed.plan.prediction.step_ms)
    assert placed.layout.nbytes <= nbytes
    if grows:  # there is room for the fastest plans of all convolutions
        fastest = unbounded(graph, free.profile).plans
        times = {name: placed.plans[name].time_ms for name in fastest}
        assert times == {name: p.time_ms for name, p in fastest.items()}


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


def check_pieces(placed):
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
    check_pieces(placed)
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
    check_pieces(placed)
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
    check_pieces(placed)
    assert placed.nbytes <= virtual.budget
    asked = placed.plan.prediction.step_ms
    assert asked <= 1.01 * place_step(static).plan.prediction.step_ms
    assert place_step(virtual.within(float("inf"))).nbytes <= most


def test_what_cannot_be_mapped_is_refused(bench, monkeypatch):
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
    executor, _ = bench.executor(plan.schedule, layout=layout)
    executor.run(bench.feeds())
    monkeypatch.setattr("os.getpid", lambda: 1)
    with pytest.raises(BackendError, match="not in its forks"):
        executor.run(bench.feeds())


def slower(profile, times):
    """The same with nodes that take so many times as long."""
    return replace(
        profile,
        node_ms={name: times * ms for name, ms in profile.node_ms.items()},
        fronts={
            name: tuple(
                replace(
                    plan,
                    steps=tuple(
                        replace(step, time_ms=times * step.time_ms)
                        for step in plan.steps
                    ),
                )
                for plan in front
            )
            for name, front in profile.fronts.items()
        },
    )


@pytest.fixture
def searched(monkeypatch):
    """The requests that a plan was searched for."""
    found, real = [], step_planning.search

    def search(request):
        found.append(request)
        return real(request)

    monkeypatch.setattr(step_planning, "STEP_PLANNERS", {"planned": search})
    return found


@pytest.fixture
def bounded():
    """A graph, what it costs, and a budget that not all of it fits."""
    graph = with_updates(training_graph(get_model("lenet")(64)), Momentum())
    known = estimate(graph, "p100")
    return graph, known, int(0.6 * unbounded(graph, known).peak_bytes)


def unchanged(tuner, profile, plans, measured, *, memory):
    """What `refine` makes of plans that take as long as they are known to."""
    measured.update((plan, plan.time_ms) for plan in plans)
    return profile


def placed_within(graph, **budget):
    with Tuner(backend="null", rule=QUICK) as tuner:
        (placed,) = place_steps(tuner, [graph], MemoryBudget(**budget))
    peak = verify(placed.schedule, granularity=ALIGNMENT)
    assert peak <= placed.nbytes <= budget["nbytes"]
    return placed


@pytest.mark.parametrize(("times", "searches"), [(0.5, 1), (1.0, 1), (3.0, 2)])
def test_only_where_a_step_is_much_slower_than_it_seemed_is_another_searched_for(
    times, searches, bounded, searched, monkeypatch
):
    graph, known, budget = bounded
    refined = slower(known, times)

    def refine(tuner, profile, plans, measured, *, memory):
        unchanged(tuner, profile, plans, measured, memory=memory)
        return refined

    monkeypatch.setattr(planned_steps, "refine", refine)
    placed = placed_within(graph, nbytes=budget, measured=known)
    assert len(searched) == searches
    assert searched[0].seed is None
    assert placed.plan.least_ms <= placed.plan.prediction.step_ms


def test_a_plan_that_was_found_before_stays_where_it_fits(
    bounded, searched, monkeypatch
):
    graph, known, budget = bounded
    more = int(1.4 * budget)  # its plan keeps what does not fit half of it
    monkeypatch.setattr(planned_steps, "refine", unchanged)
    found = plan_step(StepRequest(graph, known, budget=more))
    searched.clear()
    placed = placed_within(graph, nbytes=more, measured=known, plan=found)
    assert not searched
    assert placed.plan.residency == found.residency
    assert placed.plan.least_ms == pytest.approx(found.least_ms)
    less = int(0.5 * more)
    placed = placed_within(graph, nbytes=less, measured=known, plan=found)
    assert searched
    assert placed.plan.residency != found.residency
    with pytest.raises(TypeError, match="plan must be a StepPlan"):
        MemoryBudget(nbytes="1MiB", plan={})
