"""Policy `planned`: search for the least simulated step time within a budget.

The linear program of `planning/program.py` comes first. Where its plan is as good as
its optimum, or the step is too large for trials of single tensors, nothing else runs.

Otherwise a local search runs beside it, and the faster plan wins. It starts from the
residencies of every other policy, so it is never worse than the best of them, and from
the request's seed. The best of a one-parameter family (see `candidates`) is improved
tensor by tensor. Scheduler and dynamic workspaces decide how freed bytes are used, and
the simulator evaluates the result. Parameters and optimizer state are offloaded where
that is faster, or where nothing else fits.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace

from mucudnn.errors import PlanningError
from mucudnn.passes.planning.bound import LowerBound, lower_bound
from mucudnn.passes.planning.milp import MOST_SAVED, exact
from mucudnn.passes.planning.program import fill
from mucudnn.passes.planning.request import StepRequest, check_residency, plan_residency
from mucudnn.passes.planning.search.collection import gc_relaxed
from mucudnn.passes.planning.search.explore import explore, improved
from mucudnn.passes.planning.search.trials import SearchState, closer
from mucudnn.passes.planning.vdnn_dyn import vdnn_dyn
from mucudnn.passes.residency import (
    EVERYTHING,
    PERSISTENTS,
    RECOMPUTED_BACKWARD,
    Residency,
)
from mucudnn.passes.residency.candidates import (
    Candidate,
    by_cost,
    candidates_of,
    initial_residencies,
    pairs,
    policy_residencies,
    recompute_first,
    single_changes,
)
from mucudnn.passes.residency.policies import keep_all
from mucudnn.passes.scheduling import SCHEDULERS
from mucudnn.passes.scheduling.step_plan import StepPlan

_WORK = 60_000
"""Limit of scheduled nodes and offloaded parameters and state over all trials, not
counting the first ones."""

_SLOW = 1.5
"""Slowdown over the step without a budget above which more is tried."""

_NEAR = 1.005
"""Factor on the lower bound below which exploration is skipped."""

_CLOSE = 1.01
"""Factor on the program's optimum up to which its plan needs no local search."""

_SMALL = 400
"""Nodes of a step up to which the optimum, which is no proven bound, is not trusted."""

_LARGE = 3000
"""Nodes of a step from which the program's plan is not compared with a local search."""

_LEAST_TRIALS = 12
"""SearchState of the largest graphs, not counting the first ones."""


@gc_relaxed()
def search(request: StepRequest, *, thorough: bool = True) -> StepPlan:
    """Search for the fastest plan.

    Args:
        request: The planning request.
        thorough: Whether to explore as well, which takes as long as the rest of the
            search and helps little unless the budget is tight.

    Raises:
        PlanningError: No residencies fit; the error of those that came closest.
    """
    best = SearchState(request, 0)
    best.consider(keep_all(request), free=True)
    if best.found and best.step_ms <= _unbounded_ms(request):
        return replace(best.plan, least_ms=best.step_ms)
    bound = lower_bound(request)
    optimum = fill(request, best)
    nodes = len(request.graph.nodes)
    large = best.found and nodes > _LARGE
    trusted = bound.step_ms if nodes <= _SMALL else optimum
    if optimum is None or not (large or best.step_ms <= _CLOSE * (trusted or 0.0)):
        found = _local_search(request, bound, thorough=thorough)
        if found.found:
            best.take_over(found)
        elif not best.found:
            best = found  # has the error of the residencies that came closest
    return replace(best.plan, least_ms=bound.step_ms)


def _local_search(
    request: StepRequest, bound: LowerBound, *, thorough: bool
) -> SearchState:
    """Search from the policies' residencies, tensor by tensor."""
    candidates = by_cost(candidates_of(request))
    best = SearchState(request, _work(request), by_nodes=True)
    best.consider(keep_all(request), free=True)
    begin = _begin(request, candidates)
    for residency in begin:
        best.consider(residency, free=True)
    fits = best.found
    if not fits:
        try:
            best.consider(least_memory(request, begin), free=True)
        except PlanningError:
            return best
    if request.convolutions == "dynamic":
        _offer_vdnn_dyn(request, best)
    if len(candidates) <= MOST_SAVED:
        solution = exact(request)
        if solution is not None:
            best.consider(solution.residency, free=True)
    if request.hosted is None:
        for residency in [best.residency] if fits else begin:
            for choice in (Residency.OFFLOAD, Residency.PAGE):
                best.consider({**residency, PERSISTENTS: choice}, free=True)
    for residency in _family(candidates, best):
        best.consider(residency)
    _improve(candidates, best)
    if request.scheduler is None:
        _offer_other_schedulers(request, candidates, best)
    if thorough and best.step_ms > _NEAR * bound.step_ms:
        explore(request, candidates_of(request), bound.residency, best)
    return best


def search_on(request: StepRequest, plan: StepPlan) -> StepPlan:
    """Explore from the plan of a search that was not thorough."""
    if plan.least_ms is None or plan.prediction.step_ms <= _NEAR * plan.least_ms:
        return plan
    best = SearchState(request, 0)
    best.offer(plan)
    explore(request, candidates_of(request), {}, best)
    return replace(best.plan, least_ms=plan.least_ms)


def least_memory(
    request: StepRequest, begin: Sequence[Mapping[str, Residency]] | None = None
) -> Mapping[str, Residency]:
    """Return residencies that fit, among those that need the least memory.

    A search succeeds if and only if there are any, so the feasibility of a budget is
    known without a search. If none fit, the error of the closest is raised.
    """
    if begin is None:
        begin = _begin(request, by_cost(candidates_of(request)))
    closest: PlanningError | None = None
    for paged in ({PERSISTENTS: Residency.PAGE}, {}):
        for residency in begin:
            try:
                check_residency(request, {**residency, **paged})
            except PlanningError as e:
                error = copy(e)  # without a traceback, which would hold callers' locals
                closest = closer(closest or error, error)
            else:
                return {**residency, **paged}
    raise copy(closest or PlanningError("nothing was tried"))


def _begin(
    request: StepRequest, candidates: Sequence[Candidate]
) -> list[Mapping[str, Residency]]:
    own = [] if request.seed is None else [request.seed]
    return own + initial_residencies(request, candidates)


def _work(request: StepRequest) -> int:
    return max(_WORK, _LEAST_TRIALS * len(request.graph.nodes))


def _unbounded_ms(request: StepRequest) -> float:
    """Return the step time without a budget, slightly increased for rounding."""
    unbounded = plan_residency(request.within(math.inf), keep_all(request))
    return unbounded.prediction.step_ms * (1 + 1e-9)


def _offer_vdnn_dyn(request: StepRequest, best: "SearchState") -> None:
    others = ("on_demand",) if request.scheduler is None else ()
    for scheduler in (request.timing, *others):
        with suppress(PlanningError):
            best.offer(vdnn_dyn(request.scheduled(scheduler)))


def _offer_other_schedulers(
    request: StepRequest, candidates: list[Candidate], best: "SearchState"
) -> None:
    """Try the best residencies and the policies' under the other schedulers.

    If the step is still slow, the best of these schedulers gets a search of its own.
    """
    found = best.residency
    others = []
    for name in SCHEDULERS.table:
        if name != request.timing:
            other = SearchState(
                request.scheduled(name), _work(request) // 2, by_nodes=True
            )
            for residency in (found, *policy_residencies(request)):
                other.consider(residency, free=True)
            others.append(other)
    other = min(others, key=lambda r: r.step_ms)
    if min(best.step_ms, other.step_ms) > _SLOW * _unbounded_ms(request):
        _improve(candidates, other)
    if other.found:
        best.offer(other.plan)


def _family(
    candidates: Sequence[Candidate], best: SearchState
) -> Iterator[dict[str, Residency]]:
    """Yield members of the one-parameter family, coarse first, then around the best."""
    total = len(candidates)
    for mode in RECOMPUTED_BACKWARD:
        stride = max(1, total // 8)
        counts = sorted({*range(0, total + 1, stride), total})
        scores: dict[int, float] = {}
        while True:
            for count in counts:
                if count in scores:
                    continue
                before = best.step_ms
                persistents = best.residency.get(PERSISTENTS, Residency.KEEP)
                yield {
                    **recompute_first(candidates, count, mode),
                    PERSISTENTS: persistents,
                }
                scores[count] = best.step_ms if best.step_ms < before else math.inf
            if stride == 1 or best.exhausted():
                break
            stride = max(1, stride // 4)
            centre = min(scores, key=lambda count: (scores[count], count))
            counts = [
                count
                for count in range(centre - 2 * stride, centre + 2 * stride + 1, stride)
                if 0 <= count <= total
            ]


def _improve(candidates: Sequence[Candidate], best: SearchState) -> None:
    """Change the residency of one tensor at a time, then of two, the largest first."""
    largest = sorted(candidates, key=lambda c: -c.saved.nbytes)
    names = [*(candidate.saved.name for candidate in largest), EVERYTHING, PERSISTENTS]
    while improved(single_changes(names), best) or improved(pairs(names), best):
        continue
