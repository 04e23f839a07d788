"""One value asks for a step: what it refuses, what it shares, where a search starts."""

import math
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given, strategies as st

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvPlan
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step
from mucudnn.passes.planning.request import StepRequest, plan_residency
from mucudnn.passes.residency import Residency, saved_tensors
from tests.examples import examples
from tests.random_graphs import profiles, residencies, training_graphs

DEFAULTS = {
    "budget": math.inf,
    "policy": "planned",
    "scheduler": None,
    "convolutions": "dynamic",
    "plans": None,
    "hosted": None,
    "seed": None,
    "placement": "static",
}


@pytest.fixture(scope="module")
def lenet():
    graph = training_graph(get_model("lenet")(2))
    return StepRequest(graph, estimate(graph, "null"))


def test_its_fields_and_their_defaults(lenet):
    names = [field.name for field in fields(StepRequest)]
    assert names == ["graph", "profile", *DEFAULTS]
    assert {name: getattr(lenet, name) for name in DEFAULTS} == DEFAULTS
    assert repr(lenet.within(7)).startswith("StepRequest(budget=7, policy='planned'")
    with pytest.raises(FrozenInstanceError):
        lenet.budget = 1


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("graph", "lenet", TypeError, r"graph must be a Graph, .*got 'lenet'"),
        ("profile", None, TypeError, r"profile must be a Profile, .*got None"),
        ("budget", -1, ValueError, "budget must be at least 0, got -1"),
        ("budget", math.nan, ValueError, "budget must be at least 0, got nan"),
        ("budget", None, TypeError, "budget must be a number, got None"),
        ("budget", True, TypeError, "budget must be a number, got True"),
        ("budget", "lots", ValueError, "'lots' is not a size"),
        ("policy", "x", ValueError, r"unknown policy 'x'; choose one of: .*vdnn_dyn"),
        ("policy", 3, TypeError, "must be a name or a function, got 3"),
        ("scheduler", "x", ValueError, r"unknown scheduler 'x'; choose .*timed"),
        ("convolutions", "x", ValueError, r"unknown convolutions 'x'; .*: dynamic"),
        ("convolutions", "fixed", ValueError, "fixed convolutions need their plans"),
        ("plans", ["a"], TypeError, "plans must be a mapping from nodes to plans"),
        ("hosted", "weight", TypeError, "hosted must be a frozenset of names"),
        ("seed", "keep", TypeError, "seed must be a mapping from tensors"),
        ("seed", {"gone": Residency.KEEP}, ValueError, "seed names 'gone', which"),
        ("seed", {"image": "keep"}, TypeError, r"seed has 'keep' for .*Residency.KEEP"),
    ],
)
def test_what_it_refuses(lenet, field, value, error, message):
    with pytest.raises(error, match=message):
        replace(lenet, **{field: value})


def test_costs_and_plans_are_of_the_graph(lenet):
    profile, nodes = lenet.profile, lenet.graph.nodes
    fewer = {node.name: 1.0 for node in nodes[2:]}
    with pytest.raises(ValueError, match="profile must cover all nodes of the graph"):
        replace(lenet, profile=replace(profile, node_ms=fewer))
    name, *others = profile.fronts
    plans: dict[str, ConvPlan] = {n: profile.fronts[n][0] for n in others}
    with pytest.raises(ValueError, match=f"plans must cover all .*'{name}' "):
        replace(lenet, convolutions="fixed", plans=plans)


def test_a_budget_may_be_a_size(lenet):
    assert replace(lenet, budget="1.5GiB").budget == 3 << 29
    assert lenet.within(7).budget == 7


def test_only_what_is_asked_counts_for_equality(lenet):
    other = StepRequest(lenet.graph, lenet.profile)
    other.rewritten({})
    assert other == lenet
    assert lenet.within(9) == StepRequest(lenet.graph, lenet.profile, 9) != lenet
    assert lenet.within(9).within(math.inf) == lenet


def test_a_graph_is_rewritten_once_for_all_budgets(lenet):
    found = lenet.rewritten({})
    other = lenet.within(9).scheduled("on_demand").rewritten({})
    assert other.graph is found.graph
    assert lenet.hosting(lenet.persistent).rewritten({}).away == lenet.persistent
    assert lenet.rewritten({}).away == frozenset()


@examples(12)
@given(data=st.data())
def test_a_search_is_never_worse_than_its_seed(data):
    graph = data.draw(training_graphs(most=4))
    request = StepRequest(graph, data.draw(profiles(graph)))
    seed = data.draw(residencies(graph))
    least, most = minimum_budget(request), plan_residency(request, {}).peak_bytes
    request = request.within(data.draw(st.integers(least, max(least, most))))
    ours = plan_step(replace(request, seed=seed)).prediction.step_ms
    try:
        assert ours <= plan_residency(request, seed).prediction.step_ms
    except PlanningError:  # then it is of no use
        assert ours > 0
    one = replace(request, policy="paging")
    assert plan_step(replace(one, seed=seed)).schedule == plan_step(one).schedule


def test_a_seed_is_tried(lenet):
    """What nothing else proposes is found where it is the seed."""
    tried = []

    def spying(problem):
        tried.append(frozenset(problem.swaps))
        return problem.least()

    odd = saved_tensors(lenet.graph)[0].name
    request = replace(lenet, scheduler=spying, budget=minimum_budget(lenet))
    seed = {odd: Residency.OFFLOAD}
    plan_step(replace(request, seed=seed))
    with_seed = set(tried)
    assert frozenset(seed) in with_seed
