"""The search by blocks and groups: what it tries, and that it helps."""

from collections import Counter

import pytest

from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import ALIGNMENT
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step, unbounded
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.search import explore as module, search as first
from mucudnn.passes.planning.search.explore import explore
from mucudnn.passes.planning.search.trials import SearchState
from mucudnn.passes.residency import Residency
from mucudnn.passes.residency.candidates import (
    blockwise,
    candidates_of,
    group_changes,
    policy_residencies,
)
from tests.schedule_oracle import verify


def request(model="resnet18", batch=32, share=0.2):
    graph = with_updates(training_graph(get_model(model)(batch)), Momentum())
    free = StepRequest(graph, estimate(graph, "h200"))
    if share is None:
        return free
    least, most = minimum_budget(free), unbounded(graph, free.profile).peak_bytes
    return free.within(least + int(share * (most - least)))


def test_a_rule_treats_all_blocks_alike_and_keeps_their_ends():
    asked = request(share=None)
    candidates = candidates_of(asked)
    rules = list(blockwise(asked.graph, candidates))
    assert all(set(rule) == {c.saved.name for c in candidates} for rule in rules)
    assert len({frozenset(rule.items()) for rule in rules}) > 30
    kept = rules[0]
    ends = [name for name, choice in kept.items() if choice is Residency.KEEP]
    assert len(ends) == 8  # blocks of ResNet-18
    producers = asked.graph.producers
    assert {producers[name].op for name in ends} <= {"add", "relu"}
    half = next(r for r in rules if Counter(r.values())[Residency.KEEP] == 4)
    assert {n for n, c in half.items() if c is Residency.KEEP} == set(ends[::2])


def test_without_joints_a_block_ends_at_each_checkpoint():
    asked = request("alexnet", share=None)
    candidates = candidates_of(asked)
    kept = next(blockwise(asked.graph, candidates))
    ends = {name for name, choice in kept.items() if choice is Residency.KEEP}
    assert ends == {c.saved.name for c in candidates if c.checkpoint}


def test_a_change_is_of_a_whole_group():
    asked = request(share=None)
    candidates = candidates_of(asked)
    changes = list(group_changes(asked.graph, candidates))
    nbytes = {c.saved.name: c.saved.nbytes for c in candidates}
    groups = list(dict.fromkeys(tuple(n for n, _ in change) for change in changes))
    assert all(len(group) > 1 for group in groups)
    assert len(changes) == 5 * len(groups)
    sizes = [sum(nbytes[name] for name in group) for group in groups]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("scheduler", ["timed", "on_demand"])
def test_exploring_improves_on_policies_and_keeps_to_the_scheduler_that_is_named(
    monkeypatch, scheduler
):
    monkeypatch.setattr(module, "_MOST", 40)
    asked = request(share=0.08).scheduled(scheduler)
    best = SearchState(asked, 0)
    for residency in policy_residencies(asked):
        best.consider(residency, free=True)
    before = best.step_ms
    explore(asked, candidates_of(asked), {}, best)
    assert best.step_ms < 0.95 * before
    assert best.plan.scheduler == scheduler
    assert verify(best.plan.schedule, asked.budget, granularity=ALIGNMENT)


@pytest.mark.slow
def test_exploring_helps_where_many_tensors_have_to_leave(monkeypatch):
    asked = request(share=0.08)
    times = []

    def watched(step, candidates, nearest, best):
        times.append(best.step_ms)
        explore(step, candidates, nearest, best)
        times.append(best.step_ms)

    monkeypatch.setattr(first, "explore", watched)
    found = plan_step(asked)
    before, after = times
    assert found.prediction.step_ms == after < 0.99 * before
    assert verify(found.schedule, asked.budget, granularity=ALIGNMENT)
    assert found.least_ms <= found.prediction.step_ms
