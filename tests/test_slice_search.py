"""The search of steps in slices: what it carries over, and how it goes on."""

from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import ALIGNMENT
from mucudnn.passes.planning import split_search as module
from mucudnn.passes.planning.plan_step import minimum_budget
from mucudnn.passes.planning.request import StepRequest, plan_residency
from mucudnn.passes.planning.split_search import SliceSearch, carried_over
from mucudnn.passes.residency import EVERYTHING, PERSISTENTS, Residency
from mucudnn.passes.residency.candidates import (
    alike_changes,
    candidates_of,
    same_changes,
    slices_of,
)
from tests.graphs import split_batch
from tests.schedule_oracle import verify

GRAPH = training_graph(get_model("resnet20")(64))


def request(parts):
    graph = GRAPH if parts == 1 else split_batch(GRAPH, parts)
    graph = with_updates(graph, Momentum())
    return StepRequest(graph, estimate(graph, "h200"))


def test_what_is_known_of_the_whole_is_carried_over_to_all_its_slices():
    whole, slices = candidates_of(request(1)), candidates_of(request(4))
    choices = list(Residency)
    known = {c.saved.name: choices[i % 5] for i, c in enumerate(whole)}
    found = carried_over({**known, EVERYTHING: Residency.PAGE}, slices)
    assert found.keys() == {c.saved.name for c in slices}
    for name, choice in found.items():
        assert choice is known.get(name.partition("@")[0], Residency.PAGE)
    assert len(set(found.values())) == 5


def test_slices_take_after_those_that_they_lie_in():
    two, four = candidates_of(request(2)), candidates_of(request(4))
    halves = {
        c.saved.name: Residency.KEEP if "@0" in c.saved.name else Residency.OFFLOAD
        for c in two
        if "@" in c.saved.name
    }
    found = carried_over(halves, four)
    cut = [n for n in found if n.endswith(("@0", "@1", "@2", "@3"))]
    assert len(cut) > 40
    for name in cut:
        first = name.endswith(("@0", "@1"))
        assert found[name] is (Residency.KEEP if first else Residency.OFFLOAD)
    back = carried_over(found, two)
    assert {name: back[name] for name in halves} == halves


def test_it_goes_on_from_the_whole_and_rounds_never_make_it_slower(monkeypatch):
    monkeypatch.setattr(module, "_LEAST_TRIALS", 10)
    monkeypatch.setattr(module, "_WORK", 0)
    asked = request(4)
    asked = asked.within(int(1.2 * minimum_budget(asked)))
    whole = {c.saved.name: Residency.KEEP for c in candidates_of(request(1))}
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
    asked = request(4)
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
    asked = request(2).within(1 << 40)
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
    candidates = candidates_of(request(2))
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
    monkeypatch.setattr(module, "_ALIKE", 4)
    monkeypatch.setattr(module, "_MUCH", -1.0)
    asked = request(4)
    asked = asked.within(2 * minimum_budget(asked))
    search = SliceSearch(asked)
    search.begin({EVERYTHING: Residency.OFFLOAD})
    before = search.plan.prediction.step_ms
    assert search.finish() is (search.plan.prediction.step_ms < before)
    assert search.plan.prediction.step_ms == search._best.step_ms
    assert verify(search.plan.schedule, asked.budget, granularity=ALIGNMENT)
