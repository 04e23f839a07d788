"""Steps with places: state and arena together keep the budget."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from mucudnn.errors import PlanningError
from mucudnn.ir.devices import DEVICES
from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.schedule import STATIC, VIRTUAL, Alloc, Compute, Free
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import ALIGNMENT, rounded
from mucudnn.passes.placement.layout import lay_out, lives_of
from mucudnn.passes.planning.place_step import place_step
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step, unbounded
from mucudnn.passes.planning.request import StepRequest, plan_residency
from mucudnn.runtime.training import planned_steps
from mucudnn.runtime.training.planned_steps import place_steps
from mucudnn.runtime.tuning.tuner import Tuner
from tests.doubles import QUICK
from tests.examples import examples
from tests.plain_schedule import keep_all
from tests.random_graphs import profiles, training_graphs
from tests.schedule_oracle import verify

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


def test_a_budget_below_everything_says_what_would_do(step):
    graph, profile, least, _ = step
    with pytest.raises(PlanningError, match="the least budget that works is"):
        place_step(StepRequest(graph, profile, budget=least["planned"] - 1))


@pytest.fixture(scope="module")
def large():
    """A request without a budget, its peak and the least that it needs."""
    graph = with_updates(training_graph(get_model("alexnet")(256)), Momentum())
    request = StepRequest(graph, estimate(graph, "h200"))
    peak = unbounded(graph, request.profile).peak_bytes
    return request, peak, minimum_budget(request)


@pytest.mark.parametrize(("share", "most"), [(0.5, 1.01), (0.2, 1.025), (0.05, 1.01)])
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
