"""Whatever returns a step, its prediction and its peak are of the schedule it has."""

from hypothesis import given, strategies as st

from mucudnn.passes.liveness import ALIGNMENT
from mucudnn.passes.placement.fit_to_arena import (
    fit_to_arena,
    grow_workspaces,
    shortest,
    with_least_workspaces,
)
from mucudnn.passes.placement.layout import PlacedStep, lay_out
from mucudnn.passes.planning.place_step import place_step
from mucudnn.passes.planning.plan_step import (
    minimum_budget,
    plan_of_least,
    plan_step,
    try_technique,
    unbounded,
)
from mucudnn.passes.planning.request import StepRequest, plan_residency
from mucudnn.passes.residency import policy_names
from mucudnn.passes.scheduling.problem import profile_of, timed_by
from mucudnn.passes.simulate import simulate
from tests.examples import examples
from tests.random_graphs import profiles, residencies, training_graphs
from tests.schedule_oracle import verify


def found_by_all(data, graph, profile):
    """One step of everything that returns one."""
    policy = data.draw(st.sampled_from(policy_names()))
    least = minimum_budget(StepRequest(graph, profile, policy=policy))
    budget = least + data.draw(st.integers(0, 20)) * 1000
    way = {"budget": budget, "policy": policy}
    yield unbounded(graph, profile)
    yield plan_of_least(StepRequest(graph, profile, policy=policy))
    yield try_technique(
        StepRequest(graph, profile, policy=policy, scheduler="timed", budget=budget)
    ).plan
    given_ones = data.draw(residencies(graph))
    yield plan_residency(StepRequest(graph, profile, budget=float("inf")), given_ones)
    yield place_step(StepRequest(graph, profile, **way)).plan
    plan = plan_step(StepRequest(graph, profile, **way))
    yield plan
    yield shortest(plan)
    bare = with_least_workspaces(plan)
    yield bare
    layout = lay_out(bare.schedule)
    yield grow_workspaces(PlacedStep(bare, layout), layout.nbytes + 4096).plan
    placed = fit_to_arena(plan, 2 * budget)
    assert placed is not None
    yield placed.plan


@examples(30)
@given(data=st.data())
def test_predictions_are_of_the_schedule(data):
    graph = data.draw(training_graphs(most=4, updates=data.draw(st.booleans())))
    profile = data.draw(profiles(graph))
    for plan in found_by_all(data, graph, profile):
        schedule = plan.schedule
        times = timed_by(profile_of(schedule.graph, profile), plan.plans)
        assert plan.prediction == simulate(schedule, times)
        assert verify(schedule, granularity=ALIGNMENT) == plan.peak_bytes
        for name, chosen in plan.plans.items():
            assert chosen.workspace <= schedule.workspaces.get(name, 0)
