"""Advice works: what a refusal names is enough, and a byte less is not."""

import itertools
import math
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from mucudnn.errors import PlanningError
from mucudnn.ir.graph import PERSISTENT
from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.sizes import exact_bytes
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import ALIGNMENT
from mucudnn.passes.placement.layout import lay_out
from mucudnn.passes.planning import place_step as placing
from mucudnn.passes.planning.place_step import place_step
from mucudnn.passes.planning.plan_step import (
    budget_for_slowdown,
    least_budget_above,
    minimum_budget,
    plan_step,
)
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.residency import policy_names
from mucudnn.passes.scheduling import SCHEDULERS
from mucudnn.passes.scheduling.problem import CONVOLUTIONS
from tests.examples import examples
from tests.random_graphs import profiles, training_graphs
from tests.schedule_oracle import verify

pytestmark = pytest.mark.usefixtures("short_searches")

WAYS = tuple(itertools.product(policy_names(), (None, *SCHEDULERS.table), CONVOLUTIONS))


@st.composite
def steps(draw, most=5):
    """A graph, a profile, fixed plans, and what is at home on the host, or nothing."""
    graph = draw(training_graphs(most=most, updates=draw(st.booleans())))
    profile = draw(profiles(graph))
    plans = {
        name: draw(st.sampled_from(front)) for name, front in profile.fronts.items()
    }
    names = [spec.name for spec in graph.with_role(*PERSISTENT)]
    hosted = draw(st.none() | st.frozensets(st.sampled_from(names)))
    return graph, profile, plans, hosted


def way_of(draw, plans):
    policy, scheduler, convolutions = draw(st.sampled_from(WAYS))
    return {
        "policy": policy,
        "scheduler": scheduler,
        "convolutions": convolutions,
        "plans": plans if convolutions == "fixed" else None,
    }


@examples(40)
@given(data=st.data())
def test_the_advised_budget_works_and_a_byte_less_does_not(data):
    graph, profile, plans, hosted = data.draw(steps())
    way = way_of(data.draw, plans) | {"hosted": hosted}
    least = minimum_budget(StepRequest(graph, profile, **way))
    asked = data.draw(st.integers(0, least - 1) | st.just(least - 1))
    with pytest.raises(PlanningError) as caught:
        plan_step(StepRequest(graph, profile, budget=asked, **way))
    error = pickle.loads(pickle.dumps(caught.value))
    advised = error.least_bytes
    assert error.short_by == advised - asked
    assert error.node.partition("~")[0] in graph.by_name
    message = str(error)
    assert message.startswith(f"{exact_bytes(advised - asked)} short: node '")
    assert f"the budget is {exact_bytes(asked)}" in message
    assert message.endswith(f"the least budget that works is {exact_bytes(advised)}")
    assert (
        plan_step(StepRequest(graph, profile, budget=advised, **way)).peak_bytes
        <= advised
    )
    with pytest.raises(PlanningError):
        plan_step(StepRequest(graph, profile, budget=advised - 1, **way))


CLAIM = "the least budget that works is "


def placed_by_advice(graph, profile, asked, way):
    """Refused, and then placed within what was advised; the error."""
    with pytest.raises(PlanningError) as caught:
        place_step(StepRequest(graph, profile, budget=asked, **way))
    error = caught.value
    advised = error.least_bytes
    assert error.short_by == advised - asked > 0
    assert exact_bytes(advised) in str(error)
    placed = place_step(StepRequest(graph, profile, budget=advised, **way))
    assert placed.nbytes <= advised
    verify(placed.plan.schedule, advised, granularity=ALIGNMENT)
    if CLAIM in str(error):
        with pytest.raises(PlanningError):
            place_step(StepRequest(graph, profile, budget=advised - 1, **way))
    else:
        assert str(error).endswith(f"{exact_bytes(advised)} is enough")
    return error


@examples(25)
@given(data=st.data())
def test_places_are_found_within_the_advised_budget(data):
    graph, profile, plans, hosted = data.draw(steps())
    way = way_of(data.draw, plans) | {"hosted": hosted}
    least = minimum_budget(StepRequest(graph, profile, **way))
    asked = data.draw(st.integers(0, least - 1) | st.just(least - 1))
    placed_by_advice(graph, profile, asked, way)


@pytest.mark.slow
@examples(15)
@given(data=st.data())
def test_advice_holds_where_places_are_hard_to_find(data):
    """Nothing gives way, and every arena has a hole that nothing fits."""

    def wasteful(schedule, **options):
        layout = lay_out(schedule, **options)
        return replace(layout, nbytes=layout.nbytes + 5 * ALIGNMENT)

    graph, profile, plans, hosted = data.draw(steps(most=3))
    way = way_of(data.draw, plans) | {"hosted": hosted}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing, "fit_to_arena", lambda *args, **options: None)
        patch.setattr(placing, "lay_out", wasteful)
        least = minimum_budget(StepRequest(graph, profile, **way))
        short = data.draw(st.sampled_from([1, least // 2, least]))
        errors = [placed_by_advice(graph, profile, least - short, way)]
        try:
            place_step(StepRequest(graph, profile, budget=least, **way))
        except PlanningError:
            errors.append(placed_by_advice(graph, profile, least, way))
        assert all(CLAIM not in str(error) for error in errors[1:])


@pytest.mark.parametrize(
    ("policy", "convolutions"),
    [
        *(("keep_all", "dynamic"), ("superneurons", "fixed")),
        *(("paging", "dynamic"), ("vdnn_dyn", "fixed")),
    ],
)
def test_networks_are_placed_within_the_advised_budget(policy, convolutions):
    graph = with_updates(training_graph(get_model("resnet20")(4)), Momentum())
    profile = estimate(graph, "p100")
    plans = {node: front[-1] for node, front in profile.fronts.items()}
    way = {"policy": policy, "convolutions": convolutions, "plans": plans}
    assert CLAIM in str(placed_by_advice(graph, profile, 4096, way))


@given(
    threshold=st.integers(1, 1 << 40),
    asked=st.integers(0, 1 << 40),
    told=st.none() | st.integers(0, 1 << 40),
)
def test_a_threshold_is_found_whatever_refusals_say(threshold, asked, told):
    tried = []

    def attempt(budget):
        tried.append(budget)
        if budget < threshold:
            raise PlanningError("no", least_bytes=told)

    refused = min(asked, threshold - 1)
    error = PlanningError("no", least_bytes=told)
    least, last = least_budget_above(refused, error, attempt)
    assert least == threshold
    assert isinstance(last, PlanningError)
    assert len(tried) < 150


def test_what_never_works_is_given_up():
    def attempt(budget):
        raise PlanningError("never", least_bytes=budget + 1)

    assert least_budget_above(0, PlanningError("never"), attempt) is None


@given(
    st.integers(1, 1 << 40), st.integers(0, 1 << 40), st.floats(1, 3), st.floats(1, 4)
)
def test_a_budget_for_a_slowdown_is_enough_and_hardly_less_is_not(
    least, room, slowdown, slowest
):
    most = least + room
    tried = {}

    def slowdown_at(budget):
        assert least <= budget <= most
        tried[budget] = 1 + (slowest - 1) * (most - budget) / max(1, room)
        return tried[budget]

    found = budget_for_slowdown(slowdown, least, most, slowdown_at)
    assert tried[found] <= slowdown * (1 + 1e-9)
    less = [budget for budget in tried if budget < found]
    assert all(tried[budget] > slowdown for budget in less)
    if less:
        assert found - max(less) <= max(1, room // 64)
    assert len(tried) <= 9


def test_a_step_that_is_slow_within_any_budget_has_none_for_a_slowdown():
    with pytest.raises(PlanningError, match=r"slowdown of 1\.05: .* takes 1\.2 times"):
        budget_for_slowdown(1.05, 10, 1000, lambda budget: 1.2)


@pytest.mark.parametrize("slowdown", [0.99, -1.0, math.nan, math.inf, "fast", None])
def test_a_slowdown_is_a_number_from_1(slowdown):
    with pytest.raises((ValueError, TypeError), match="slowdown must be"):
        budget_for_slowdown(slowdown, 1, 2, lambda budget: 1.0)
