"""Changes that a plan suggests: where time goes, and what is proposed for it."""

import pytest
from hypothesis import given, strategies as st

from mucudnn.ir.schedule import RECOMPUTED
from mucudnn.passes.planning.request import StepRequest, plan_residency
from mucudnn.passes.planning.search.suggested import again_ms, stalls_ms, suggested
from mucudnn.passes.residency import PERSISTENTS, Residency
from mucudnn.passes.residency.candidates import candidates_of
from mucudnn.passes.scheduling.problem import origin
from tests.examples import examples
from tests.random_graphs import profiles, residencies, training_graphs
from tests.test_simulate import layers


def planned(choice, scheduler="on_demand"):
    """Layers of which every activation is treated alike."""
    graph, profile, saved = layers()
    request = StepRequest(graph, profile, scheduler=scheduler)
    plan = plan_residency(request, dict.fromkeys(saved, choice))
    return plan, candidates_of(request)


def test_stalls_are_shared_among_the_copies_that_are_waited_for():
    plan, candidates = planned(Residency.OFFLOAD)
    stalls = stalls_ms(plan, candidates)
    waited = sum(plan.prediction.stalls_ms.values())
    assert waited > 0
    assert sum(stalls.values()) == pytest.approx(waited)
    copied = {lane.name for lane in plan.prediction.lanes if lane.engine != "compute"}
    storages = plan.schedule.graph.storages
    assert {storages[name] for name in stalls} <= copied
    assert not again_ms(plan, candidates)


def test_what_runs_again_is_counted_by_what_it_is_for():
    plan, candidates = planned(Residency.RECOMPUTE_EACH)
    again = again_ms(plan, candidates)
    assert again
    assert not stalls_ms(plan, candidates)
    nodes = [origin(n.name) for n in plan.schedule.graph.nodes if "~" in n.name]
    for candidate in candidates:
        runs = nodes.count(candidate.saved.producer.name)
        expected = runs * candidate.recompute_ms
        assert again.get(candidate.saved.name, 0.0) == pytest.approx(expected)


def test_copies_are_to_be_computed_and_what_is_computed_to_leave():
    plan, candidates = planned(Residency.OFFLOAD)
    stalls = stalls_ms(plan, candidates)
    worst = min(stalls, key=lambda name: (-stalls[name], name))
    assert next(suggested(plan, candidates)) == [(worst, Residency.RECOMPUTE_EACH)]
    plan, candidates = planned(Residency.RECOMPUTE)
    assert {choice for _, choice in next(suggested(plan, candidates))} == {
        Residency.OFFLOAD
    }


@examples(60)
@given(data=st.data())
def test_every_suggestion_is_a_residency_of_saved_tensors(data):
    graph = data.draw(training_graphs(updates=True))
    request = StepRequest(graph, data.draw(profiles(graph)), scheduler="timed")
    residency = {**data.draw(residencies(graph)), PERSISTENTS: Residency.KEEP}
    least = request.rewritten(residency).least_peak()
    plan = plan_residency(request.within(least + 4096), residency)
    candidates = candidates_of(request)
    possible = {c.saved.name: c.recompute_ms < float("inf") for c in candidates}
    for change in suggested(plan, candidates):
        assert change
        for name, choice in change:
            assert possible[name] or choice not in RECOMPUTED
