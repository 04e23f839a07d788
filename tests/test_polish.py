"""The last changes of a plan: what they are, and that they help."""

import pytest

from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import ALIGNMENT
from mucudnn.passes.planning.plan_step import minimum_budget, unbounded
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.search.polish import neighbour_search
from mucudnn.passes.planning.search.trials import SearchState
from mucudnn.passes.residency import EVERYTHING, PERSISTENTS, Residency
from mucudnn.passes.residency.candidates import candidates_of
from tests.schedule_oracle import verify

MOST = 60


class Noted(SearchState):
    """SearchState that note what was asked of them."""

    def __init__(self, request, left):
        super().__init__(request, left)
        self.asked = []

    def consider(self, residency, *, free=False):
        self.asked.append((self.residency, residency))
        return super().consider(residency, free=free)


@pytest.fixture(scope="module")
def asked():
    graph = with_updates(training_graph(get_model("resnet20")(32)), Momentum())
    free = StepRequest(graph, estimate(graph, "h200"))
    least, most = minimum_budget(free), unbounded(graph, free.profile).peak_bytes
    return free.within(least + (most - least) // 3).scheduled("timed")


def polished(request, left=MOST):
    candidates = candidates_of(request)
    choices = [Residency.RECOMPUTE, Residency.OFFLOAD, Residency.KEEP]
    start = {c.saved.name: choices[i % 2] for i, c in enumerate(candidates)}
    start[candidates[-1].saved.name] = Residency.KEEP
    start |= {EVERYTHING: Residency.PAGE, PERSISTENTS: Residency.KEEP}
    tried = Noted(request, left)
    assert tried.consider(start, free=True)
    begun = tried.step_ms
    tried.asked.clear()
    return candidates, begun, neighbour_search(candidates, tried), tried


def test_a_polished_plan_is_faster_and_within_its_budget(asked):
    _, begun, better, tried = polished(asked)
    assert better
    assert tried.step_ms < begun
    verify(tried.plan.schedule, granularity=ALIGNMENT)
    assert tried.plan.peak_bytes <= asked.budget


def test_changes_are_rows_that_stay_or_two_tensors_that_change_places(asked):
    candidates, _, _, tried = polished(asked, left=4 * len(candidates_of(asked)))
    names = [c.saved.name for c in candidates]
    rows = exchanges = 0
    for before, after in tried.asked:
        changed = sorted(n for n in names if before.get(n) != after.get(n))
        if len({after[n] for n in changed}) == 1:
            at = sorted(names.index(n) for n in changed)
            assert at[-1] - at[0] < 3
            assert after[changed[0]] in (Residency.KEEP, Residency.PAGE)
            rows += 1
        elif changed:
            one, other = changed
            assert (before[one], before[other]) == (after[other], after[one])
            assert Residency.KEEP in (after[one], after[other])
            exchanges += 1
    assert rows > len(names)
    assert exchanges > 10


def test_it_stops_where_nothing_more_may_be_tried(asked):
    _, begun, better, tried = polished(asked, left=0)
    assert not better
    assert tried.step_ms == begun
