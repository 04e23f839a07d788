"""The search from many starts, of whole steps and of steps in slices."""

import math
from collections import Counter
from contextlib import suppress

import pytest

from mucudnn.errors import PlanningError
from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import ALIGNMENT
from mucudnn.passes.planning import climbing, search as module, split_search
from mucudnn.passes.planning.climbing import Climb, SearchState, changes_of
from mucudnn.passes.planning.eviction import evicted, evicted_family
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step, unbounded
from mucudnn.passes.planning.request import (
    StepRequest,
    plan_residency,
    schedule_residency,
)
from mucudnn.passes.planning.search import least_memory, search
from mucudnn.passes.planning.split_search import SliceSearch, carried_over
from mucudnn.passes.residency import EVERYTHING, PERSISTENTS, RECOMPUTED, Residency
from mucudnn.passes.residency.candidates import (
    alike_changes,
    blockwise,
    candidates_of,
    group_changes,
    paged_family,
    policy_residencies,
    same_changes,
    slices_of,
)
from tests.graphs import split_batch
from tests.schedule_oracle import verify

FEW_ROUNDS = (2, 20), (1, 20)


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
    # Without joints a block ends at each checkpoint.
    asked = request("alexnet", share=None)
    candidates = candidates_of(asked)
    kept = next(blockwise(asked.graph, candidates))
    ends = {name for name, choice in kept.items() if choice is Residency.KEEP}
    assert ends == {c.saved.name for c in candidates if c.checkpoint}


SHARES = (0.85, 0.75, 0.65)


@pytest.mark.parametrize("model", ["resnet18", "unet2d", "googlenet", "vgg16"])
def test_evictions_fit_ever_smaller_parts_of_the_budget(model):
    asked = request(model, 8, share=0.3)
    free_ms = asked.compute_ms({})
    for copy_share in (0.0, 0.05, 0.1, 1.0):
        found = list(evicted(asked, 2 * free_ms, 0, copy_share))
        for residency, share in zip(found, SHARES, strict=False):
            assert asked.need(residency)[0] <= share * asked.budget
            assert asked.compute_ms(residency) < 1.3 * free_ms
        assert not list(evicted(asked, 2 * free_ms, int(asked.budget), copy_share))
        if not copy_share:  # copies cost nothing
            assert found
            assert not any(c in RECOMPUTED for c in found[0].values())


def test_evictions_are_starts_that_need_little_time():
    asked = request(share=0.1)
    starts = [*evicted_family(asked, math.inf, 0), *paged_family(asked.candidates)]
    times = {}
    for i, start in enumerate(starts):  # the last four page nearly everything
        with suppress(PlanningError):
            times[i] = schedule_residency(asked, start).step_ms()
    assert min(times, key=times.__getitem__) < len(starts) - 4


def test_recomputation_that_takes_as_long_as_copies_is_not_tried():
    asked = request("densenet40", 64, share=0.1)
    known = {c.saved.name: c for c in asked.candidates}
    for mixed in (False, True):
        changes = [*changes_of(asked.graph, asked.candidates, mixed=mixed)]
        assert changes
        for change in changes:
            if change[0][1] in RECOMPUTED:
                group = [known[name] for name, _ in change]
                cost = sum(c.recompute_ms for c in group)
                assert cost <= 0.5 * sum(c.copy_ms for c in group)


def test_a_change_is_of_a_whole_group():
    asked = request(share=None)
    candidates = candidates_of(asked)
    changes = list(group_changes(asked.graph, candidates))
    nbytes = {c.saved.name: c.saved.nbytes for c in candidates}
    groups = list(dict.fromkeys(tuple(n for n, _ in change) for change in changes))
    assert all(len(group) > 1 for group in groups)
    assert len(changes) == 4 * len(groups)
    sizes = [sum(nbytes[name] for name in group) for group in groups]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("scheduler", ["timed", "on_demand"])
def test_a_search_improves_on_policies_and_keeps_to_the_scheduler_that_is_named(
    monkeypatch, scheduler
):
    monkeypatch.setattr(module, "_ROUNDS", FEW_ROUNDS)
    asked = request(share=0.08).scheduled(scheduler)
    policies = SearchState(asked)
    for residency in policy_residencies(asked):
        policies.consider(residency)
    plan = plan_step(asked)
    assert plan.prediction.step_ms < 0.95 * policies.step_ms
    assert plan.scheduler == scheduler
    assert plan.least_ms <= plan.prediction.step_ms
    assert verify(plan.schedule, asked.budget, granularity=ALIGNMENT)


@pytest.mark.slow
def test_further_rounds_help_where_many_tensors_have_to_leave():
    asked = request(share=0.08)
    first = search(asked, thorough=False)
    best = search(asked)
    assert best.prediction.step_ms < 0.99 * first.prediction.step_ms
    assert verify(best.schedule, asked.budget, granularity=ALIGNMENT)


def test_plans_of_tight_budgets_come_from_starts_that_page_nearly_everything(
    monkeypatch,
):
    monkeypatch.setattr(module, "_ROUNDS", FEW_ROUNDS)
    assert plan_step(request(share=0.05)).gap < 0.3  # 0.53 without these starts


def climb(share=0.15):
    asked = request("alexnet", 128, share)
    changes = list(changes_of(asked.graph, candidates_of(asked)))
    return Climb(asked, changes, least_memory(asked))


def test_no_residencies_are_tried_twice_and_no_more_than_were_asked_for(monkeypatch):
    tried = []

    def noted(step, residency, below):
        tried.append(frozenset(residency.items()))
        return schedule_residency(step, residency, below)

    monkeypatch.setattr(climbing, "schedule_residency", noted)
    monkeypatch.setattr(SearchState, "_too_much_compute", lambda *_: False)
    better = climb()
    assert len(tried) == 1
    begun = better.step_ms
    better.run(10)
    assert len(tried) == 11 == len(set(tried))
    better.run(10_000)
    assert better.step_ms < begun
    assert len(set(tried)) == len(tried) < 5000


def test_a_climb_ends_where_no_change_helps_and_is_the_same_in_parts():
    whole, parts = climb(), climb()
    whole.run(10_000)
    for _ in range(2000):
        parts.run(5)
    assert parts.step_ms == whole.step_ms
    assert parts.state.residency == whole.state.residency
    asked = request("alexnet", 128, 0.15)
    for change in changes_of(asked.graph, candidates_of(asked)):
        assert not parts.state.consider({**parts.state.residency, **dict(change)})


def test_single_tensors_get_cheaper_residencies_until_none_helps():
    asked = request("alexnet", 128, 0.15)
    names = [c.saved.name for c in candidates_of(asked)]
    each = dict.fromkeys(names, Residency.RECOMPUTE_EACH)
    some = Climb(asked, (), {**least_memory(asked), **each})
    every = some.copy()
    begun = some.step_ms
    some.finish(names, 1)
    every.finish(names, 10_000)
    assert every.step_ms < min(begun, some.step_ms)
    found = every.state.residency
    for name in names:
        if found[name] is Residency.RECOMPUTE_EACH:
            assert not every.state.consider({**found, name: Residency.RECOMPUTE})
            assert not every.state.consider({**found, name: Residency.OFFLOAD})


def test_results_shared_by_residencies_are_those_of_each_alone():
    asked = request("alexnet", 128, 0.15)
    candidates = candidates_of(asked)
    graph, profile, budget = asked.graph, asked.profile, asked.budget

    def outcome(step, residency):
        try:
            found = schedule_residency(step, residency)
        except PlanningError as error:
            return str(error), error.least_bytes
        return [*found.intervals], found.plans, found.step_ms(), found.residency

    tried = [
        dict(change)
        for change in changes_of(graph, candidates)
        if len(change) > 1 or change[0][1] is not Residency.KEEP
    ][:90]
    starts = [*policy_residencies(asked), least_memory(asked)]
    residencies = [*starts, *({**starts[-1], **change} for change in tried)]
    fitting = 0
    for scheduler in ("timed", "adaptive_window"):
        shared = asked.scheduled(scheduler)
        for residency in residencies:
            alone = StepRequest(graph, profile, budget=budget, scheduler=scheduler)
            expected = outcome(alone, residency)
            assert outcome(shared, residency) == expected
            fitting += len(expected) > 2
    assert 20 < fitting < 2 * len(residencies)


def test_the_fastest_starts_are_those_of_all_that_are_scheduled():
    asked = request("alexnet", 128, 0.15)
    candidates = candidates_of(asked)
    starts = [*policy_residencies(asked), *blockwise(asked.graph, candidates)]
    everyone = module._fastest(asked, starts, 10_000)
    assert len(everyone) > 10
    tried = []
    asked = request("alexnet", 128, 0.15)
    rewritten = asked._rewriter.compute_ms

    def noted(residency):
        tried.append(rewritten(residency))
        return tried[-1]

    asked._rewriter.compute_ms = noted
    assert module._fastest(asked, starts, 3) == everyone[:3]
    assert (
        max(tried)
        > schedule_residency(asked.scheduled(everyone[2][0]), everyone[2][1]).step_ms()
    )


@pytest.mark.slow
def test_tight_budgets_are_planned_where_the_program_has_no_optimum():
    tight = request("googlenet", 256, 0.05)
    free = unbounded(tight.graph, tight.profile).prediction.step_ms
    assert search(tight).prediction.step_ms <= 1.15 * free


GRAPH = training_graph(get_model("resnet20")(64))


def sliced(parts):
    graph = GRAPH if parts == 1 else split_batch(GRAPH, parts)
    graph = with_updates(graph, Momentum())
    return StepRequest(graph, estimate(graph, "h200"))


def test_what_is_known_of_the_whole_is_carried_over_to_all_its_slices():
    whole, two, slices = (candidates_of(sliced(parts)) for parts in (1, 2, 4))
    choices = list(Residency)
    known = {c.saved.name: choices[i % 5] for i, c in enumerate(whole)}
    found = carried_over({**known, EVERYTHING: Residency.PAGE}, slices)
    assert found.keys() == {c.saved.name for c in slices}
    for name, choice in found.items():
        assert choice is known.get(name.partition("@")[0], Residency.PAGE)
    assert len(set(found.values())) == 5
    # Slices take after those that they lie in.
    halves = {
        c.saved.name: Residency.KEEP if "@0" in c.saved.name else Residency.OFFLOAD
        for c in two
        if "@" in c.saved.name
    }
    found = carried_over(halves, slices)
    cut = [n for n in found if n.endswith(("@0", "@1", "@2", "@3"))]
    assert len(cut) > 40
    for name in cut:
        first = name.endswith(("@0", "@1"))
        assert found[name] is (Residency.KEEP if first else Residency.OFFLOAD)
    back = carried_over(found, two)
    assert {name: back[name] for name in halves} == halves


def test_it_goes_on_from_the_whole_and_rounds_never_make_it_slower(monkeypatch):
    monkeypatch.setattr(split_search, "_LEAST_TRIALS", 10)
    monkeypatch.setattr(split_search, "_WORK", 0)
    asked = sliced(4)
    asked = asked.within(int(1.2 * minimum_budget(asked)))
    whole = {c.saved.name: Residency.KEEP for c in candidates_of(sliced(1))}
    slices = SliceSearch(asked)
    slices.begin({EVERYTHING: Residency.KEEP, PERSISTENTS: Residency.KEEP, **whole})
    first = slices.plan
    assert first is not None  # kept it does not fit
    assert verify(first.schedule, asked.budget, granularity=ALIGNMENT)
    faster = slices.improve()
    found = slices.plan
    assert faster == (found.prediction.step_ms < first.prediction.step_ms)
    assert faster
    assert verify(found.schedule, asked.budget, granularity=ALIGNMENT)
    again = plan_residency(asked.scheduled(found.scheduler), found.residency)
    assert again.prediction.step_ms == found.prediction.step_ms


def test_all_slices_of_a_tensor_change_before_any_alone():
    asked = sliced(4)
    asked = asked.within(int(1.3 * minimum_budget(asked)))
    candidates = candidates_of(asked)
    tensors = {
        frozenset(c.saved.name for c in slices)
        for slices in slices_of(candidates).values()
    }
    assert {len(slices) for slices in tensors} >= {4}
    for change in same_changes([*map(list, tensors)]):
        names = {name for name, _ in change}
        assert names == frozenset().union(*(s for s in tensors if s & names))


def test_a_better_plan_of_others_is_taken_and_a_worse_one_is_not():
    asked = sliced(2).within(1 << 40)
    slices = SliceSearch(asked)
    slow = plan_residency(asked, dict.fromkeys([EVERYTHING], Residency.PAGE))
    recomputed = {c.saved.name: Residency.RECOMPUTE for c in candidates_of(asked)}
    slices.offer(plan_residency(asked, recomputed))
    slower = slices.plan
    slices.offer(slow)
    assert slices.plan is not None
    assert slices.plan.prediction.step_ms < slower.prediction.step_ms
    slices.offer(slower)
    assert slices.plan.prediction.step_ms < slower.prediction.step_ms


def test_what_is_alike_in_all_blocks_changes_together_most_bytes_first():
    candidates = candidates_of(sliced(2))
    sizes = {c.saved.name: c.saved.nbytes for c in candidates}
    groups = [tuple(n for n, _ in change) for change in alike_changes(candidates, 99)]
    assert sorted(n for group in dict.fromkeys(groups) for n in group) == sorted(sizes)
    totals = [sum(map(sizes.get, group)) for group in groups]
    assert totals == sorted(totals, reverse=True)
    assert any(
        {n.split("/")[1] for n in group} >= {"block1", "block2", "block3"}
        for group in groups
        if all(n.count("/") > 1 for n in group)
    )
    assert len({*map(tuple, alike_changes(candidates, 3))}) == 3 * 4


def test_last_changes_of_a_step_that_waits_never_make_it_slower(monkeypatch):
    monkeypatch.setattr(split_search, "_ALIKE", 4)
    monkeypatch.setattr(split_search, "_MUCH", -1.0)
    asked = sliced(4)
    asked = asked.within(2 * minimum_budget(asked))
    search = SliceSearch(asked)
    search.begin({EVERYTHING: Residency.OFFLOAD})
    before = search.plan.prediction.step_ms
    assert search.finish() is (search.plan.prediction.step_ms < before)
    assert search.plan.prediction.step_ms == search._best.step_ms
    assert verify(search.plan.schedule, asked.budget, granularity=ALIGNMENT)
