"""A step within a budget: when better known times make a search anew."""

from dataclasses import replace

import pytest

from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.optimizer_updates import with_updates
from mucudnn.passes.liveness import ALIGNMENT
from mucudnn.passes.planning import plan_step
from mucudnn.passes.planning.comparison import unbounded
from mucudnn.runtime.training import bounded_step
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.placed_steps import place_steps
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


@pytest.mark.parametrize(("times", "searches"), [(0.5, 1), (1.0, 1), (3.0, 2)])
def test_only_where_a_step_is_much_slower_than_it_seemed_is_another_searched_for(
    times, searches, monkeypatch
):
    graph = with_updates(training_graph(get_model("lenet")(64)), Momentum())
    known = estimate(graph, "p100")
    budget = int(0.6 * unbounded(graph, known).peak_bytes)
    found, refined, real = [], [], plan_step.search

    def search(request):
        found.append(request.seed)
        return real(request)

    def refine(tuner, profile, plans, measured, *, memory):
        if not refined:
            refined.append(slower(profile, times))
        measured.update((plan, plan.time_ms) for plan in plans)
        return refined[0]

    monkeypatch.setattr(plan_step, "STEP_PLANNERS", {"planned": search})
    monkeypatch.setattr(bounded_step, "refine", refine)
    with Tuner(backend="null", rule=QUICK) as tuner:
        (placed,) = place_steps(
            tuner, [graph], MemoryBudget(nbytes=budget, measured=known)
        )
    assert len(found) == searches
    assert found[0] is None
    assert verify(placed.schedule, granularity=ALIGNMENT) <= budget
