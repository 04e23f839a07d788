"""Plan the candidates of a split, whole first, each starting from the best so far.

A planning trial of a step in k slices takes k times as long as one of the whole step,
so the whole step is planned first, and its residencies are carried over.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mucudnn.passes.planning.comparison import unbounded
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.search.search import search, search_on
from mucudnn.passes.planning.splitting.cutting import Cutting
from mucudnn.passes.planning.splitting.slice_search import SliceSearch
from mucudnn.passes.planning.splitting.step import Candidate, SplitStep
from mucudnn.passes.residency import PLANNED, Residency
from mucudnn.passes.scheduling.step_plan import StepPlan

__all__ = ["Candidates", "too_deep"]

_CLOSE = 1.03
"""Factor on the fastest candidate within which the whole step is explored."""

_HARDLY_SLOWER = 1.01
"""Factor on the fastest candidate within which slices are improved. Their start has all
that is known of the others, so that first improvements are small."""

_ENOUGH = 1.15
"""Factor on the minimum feasible budget of the whole step, for a plan to start slices
from where the whole step does not fit."""

_HARDLY = 1.01
"""Slowdown over the step without a budget up to which nothing else is tried."""

_MOST_NODES = 20_000
"""Limit of nodes of all candidates, beyond which none is added to one that fits."""


def too_deep(tried: Sequence[Candidate]) -> bool:
    """Return whether still more parts would have too many nodes to plan.

    `tried` are the candidates so far, those with fewer parts first.
    """
    nodes = [len(c.request.graph.nodes) for c in tried if c.request is not None]
    return bool(nodes) and sum(nodes) + nodes[-1] > _MOST_NODES


class Candidates:
    """Candidates of a step; if there is one `alone`, it is planned with full effort."""

    def __init__(self, step: SplitStep, *, alone: bool) -> None:
        self._step, self._alone = step, alone
        self._tried: dict[Cutting, Candidate] = {}
        self._searches: dict[Cutting, SliceSearch] = {}
        self._explored = alone

    @property
    def tried(self) -> list[Candidate]:
        """All candidates, in the order of planning."""
        return list(self._tried.values())

    def can_skip(self, cutting: Cutting) -> bool:
        """Return whether a cutting is unlikely to be faster than all before.

        None can be much faster than the whole step without a budget. If more parts
        were slower than fewer, still more are slower still. For very deep networks the
        first candidate that fits is used.
        """
        tried = self.tried
        if not tried:
            return False
        if math.isfinite(self._fastest) and too_deep(tried):
            return True
        alike = [c for w, c in self._tried.items() if cutting.like(w) and w.parts > 1]
        planned = [w for w in self._searches if cutting.like(w)]
        slower = len(planned) > 1 and alike[-1].step_ms > self._fastest
        bound = tried[0].unbounded_ms  # infinite if it could not be measured
        return slower or (math.isfinite(bound) and self._fastest <= _HARDLY * bound)

    @property
    def _fastest(self) -> float:
        return min((c.step_ms for c in self._tried.values()), default=math.inf)

    def draft(self, cutting: Cutting) -> None:
        """Add a candidate, with a plan unless it is known to be slower."""
        step = self._step
        graph = step.in_parts(cutting)
        profile = step.costs(graph)
        if profile is None:
            self._tried[cutting] = Candidate(cutting, None, None)
            return
        request = step.asked(graph, profile)
        free = unbounded(graph, profile)
        wanted = free.prediction.step_ms
        segments = cutting.segments(step.graph)
        least = minimum_budget(request)
        kept = cutting.kept_whole(step.graph)
        found = Candidate(cutting, request, None, wanted, least, segments, kept)
        if least <= request.budget and wanted < self._fastest:
            roomy = free.peak_bytes <= request.budget
            found = replace(found, plan=self._planned(cutting, request, roomy=roomy))
        self._tried[cutting] = found

    def _planned(
        self, cutting: Cutting, request: StepRequest, *, roomy: bool
    ) -> StepPlan:
        """Make a first plan; that of slices starts from known residencies."""
        if roomy or request.policy != PLANNED:
            return plan_step(request)
        if cutting.parts == 1:
            return search(request, thorough=self._alone)
        slices = self._searches[cutting] = SliceSearch(request)
        known = self._known_residencies()
        if known is not None:
            slices.begin(known)
        if slices.plan is None:
            slices.offer(search(request, thorough=False))
        if slices.step_ms > self._fastest:
            self._explore_whole()
        if (
            slices.plan is None
            or slices.plan.prediction.step_ms < _HARDLY_SLOWER * self._fastest
        ):
            slices.improve()
        return slices.plan or plan_step(request)

    def _known_residencies(self) -> Mapping[str, Residency] | None:
        """Return residencies of the best plan, or of the whole step in more memory."""
        others = [c for c in self._tried.values() if c.plan is not None]
        best = min(others, key=lambda c: c.step_ms, default=None)
        if best is not None and best.plan is not None:
            return best.plan.residency
        whole = self._tried.get(Cutting(1))
        if whole is None or whole.request is None or whole.least_bytes is None:
            return None
        enough = whole.request.within(int(_ENOUGH * whole.least_bytes))
        return search(enough, thorough=False).residency

    def finish(self) -> None:
        """Improve the fastest candidate, and the whole step if it is close."""
        self._explore_whole()
        best = min(self.tried, key=lambda c: c.step_ms)
        if best.cutting in self._searches:
            self._improve(best.cutting)

    def _explore_whole(self) -> None:
        """Explore the whole step once, if it is close to the fastest.

        Done early where slices start slower: they may then need no search.
        """
        whole = self._tried.get(Cutting(1))
        if self._explored or whole is None or whole.plan is None:
            return
        if whole.request is not None and whole.step_ms < _CLOSE * self._fastest:
            self._explored = True
            plan = search_on(whole.request, whole.plan)
            self._tried[whole.cutting] = replace(whole, plan=plan)

    def _improve(self, cutting: Cutting) -> None:
        slices = self._searches[cutting]
        if slices.finish():
            self._tried[cutting] = replace(self._tried[cutting], plan=slices.plan)
