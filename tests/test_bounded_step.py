"""A step within a budget: when better known times make a search anew."""

from dataclasses import replace

import pytest

from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import ALIGNMENT
from mucudnn.passes.planning import plan_step
from mucudnn.passes.planning.plan_step import unbounded
from mucudnn.passes.planning.request import StepRequest
from mucudnn.runtime.training import planned_steps
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.planned_steps import place_steps
from mucudnn.runtime.tuning.tuner import Tuner
from tests.doubles import QUICK
from tests.schedule_oracle import verify


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
    found, real = [], plan_step.search

    def search(request):
        found.append(request)
        return real(request)

    monkeypatch.setattr(plan_step, "STEP_PLANNERS", {"planned": search})
    return found


@pytest.fixture
def step():
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
    times, searches, step, searched, monkeypatch
):
    graph, known, budget = step
    refined = slower(known, times)

    def refine(tuner, profile, plans, measured, *, memory):
        unchanged(tuner, profile, plans, measured, memory=memory)
        return refined

    monkeypatch.setattr(planned_steps, "refine", refine)
    placed = placed_within(graph, nbytes=budget, measured=known)
    assert len(searched) == searches
    assert searched[0].seed is None
    assert placed.plan.least_ms <= placed.plan.prediction.step_ms


def test_a_plan_that_was_found_before_stays(step, searched, monkeypatch):
    graph, known, budget = step
    monkeypatch.setattr(planned_steps, "refine", unchanged)
    found = plan_step.plan_step(StepRequest(graph, known, budget=budget))
    searched.clear()
    placed = placed_within(graph, nbytes=budget, measured=known, plan=found)
    assert not searched
    assert placed.plan.residency == found.residency
    assert placed.plan.least_ms == pytest.approx(found.least_ms)


def test_a_plan_that_no_longer_fits_is_searched_for_anew(step, searched, monkeypatch):
    graph, known, budget = step
    monkeypatch.setattr(planned_steps, "refine", unchanged)
    found = plan_step.plan_step(StepRequest(graph, known, budget=budget))
    searched.clear()
    less = int(0.8 * budget)
    placed = placed_within(graph, nbytes=less, measured=known, plan=found)
    assert searched
    assert placed.plan.residency != found.residency


def test_what_is_no_plan_is_refused():
    with pytest.raises(TypeError, match="plan must be a StepPlan"):
        MemoryBudget(nbytes="1MiB", plan={})
