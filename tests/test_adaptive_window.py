"""The two windows keep to one budget."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from mucudnn.errors import PlanningError
from mucudnn.ir.profile import Profile
from mucudnn.passes.liveness import ALIGNMENT
from mucudnn.passes.planning.request import StepRequest, plan_residency
from mucudnn.passes.residency import EVERYTHING, Residency
from mucudnn.passes.scheduling.problem import first_plans
from mucudnn.passes.scheduling.schedulers import adaptive_window
from tests.examples import examples
from tests.random_graphs import profiles, residencies, training_graphs
from tests.schedule_oracle import verify
from tests.test_simulate import layers

PAGED = {EVERYTHING: Residency.PAGE}


def problem_of(graph, profile, residency, budget):
    ready = StepRequest(graph, profile).rewritten(residency)
    plans = first_plans(ready.profile, "least")
    return ready.problem(plans, budget)


@examples(150)
@given(data=st.data())
def test_both_windows_share_the_budget(data):
    graph = data.draw(training_graphs(most=14, updates=data.draw(st.booleans())))
    profile = data.draw(profiles(graph))
    residency = data.draw(st.one_of(residencies(graph), st.just(PAGED)))
    least = StepRequest(graph, profile).rewritten(residency).least_peak()
    budget = least + data.draw(st.sampled_from([0, 1, 512, 2048, 10_000, 50_000]))
    problem = problem_of(graph, profile, residency, budget)
    intervals, _ = adaptive_window(problem)
    resident = problem.resident()
    for i, node in enumerate(problem.graph.nodes):
        scratch = problem.workspaces.get(node.name, 0)
        there = sum(s.nbytes for s in intervals if s.start <= i <= s.stop)
        assert there <= budget - resident - scratch, node.name


@examples(60)
@given(data=st.data())
def test_without_gaps_of_its_own_everything_may_leave(data):
    graph = data.draw(training_graphs())
    profile = data.draw(profiles(graph))
    least = StepRequest(graph, profile).rewritten(PAGED).least_peak()
    for residency in ({}, PAGED):
        plan = plan_residency(
            StepRequest(graph, profile, budget=least, scheduler="adaptive_window"),
            residency,
        )
        assert verify(plan.schedule, least, granularity=ALIGNMENT) <= least
    with pytest.raises(PlanningError, match="short"):
        plan_residency(
            StepRequest(graph, profile, budget=least - 1, scheduler="adaptive_window"),
            {},
        )


def test_what_is_met_again_in_time_never_leaves():
    graph, profile, _ = layers()
    peak = plan_residency(StepRequest(graph, profile, budget=math.inf), {}).peak_bytes
    found, _ = adaptive_window(problem_of(graph, profile, {}, peak))
    assert not any(interval.copied_in for interval in found)
    tight, _ = adaptive_window(problem_of(graph, profile, {}, peak - ALIGNMENT))
    assert any(interval.copied_in for interval in tight)


def test_a_clean_copy_is_not_made_twice():
    """Paged away time and again, what nobody writes leaves the device once."""
    graph, profile, _ = layers()
    least = StepRequest(graph, profile).rewritten(PAGED).least_peak()
    found, _ = adaptive_window(problem_of(graph, profile, PAGED, least))
    written = {}
    for interval in found:
        if interval.copied_out:
            written.setdefault(interval.storage, []).append(interval)
        assert interval.kept_on_host or not interval.copied_out
    uses = problem_of(graph, profile, PAGED, least).uses
    for storage, intervals in written.items():
        for one, two in pairwise(intervals):
            assert any(one.last < w <= two.last for w in uses[storage].writes)


def test_time_does_not_matter_to_it():
    graph, profile, _ = layers()
    least = StepRequest(graph, profile).rewritten(PAGED).least_peak()
    slow = Profile(
        node_ms=dict.fromkeys(profile.node_ms, 100.0),
        workspaces={},
        fronts={},
        out_bytes_per_ms=1.0,
        in_bytes_per_ms=7.0,
    )
    intervals = [
        adaptive_window(problem_of(graph, p, PAGED, least + 4096))[0]
        for p in (profile, slow)
    ]
    assert intervals[0] == intervals[1]
