"""Second phase of the search, from other starts and by larger steps.

The first phase improves the best policy's residencies tensor by tensor, which works
well while few tensors have to be offloaded. Under tight budgets no single change helps:
this phase starts from rules for whole blocks and from the solution of the relaxation,
under each scheduler, and changes groups of tensors before single ones.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.search.polish import neighbour_search
from mucudnn.passes.planning.search.suggested import suggested
from mucudnn.passes.planning.search.trials import SearchState
from mucudnn.passes.residency import (
    EVERYTHING,
    PERSISTENTS,
    RECOMPUTED_BACKWARD,
    Residency,
)
from mucudnn.passes.residency.candidates import (
    Candidate,
    Change,
    blockwise,
    group_changes,
    same_changes,
    single_changes,
    slices_of,
    total_bytes,
)
from mucudnn.passes.scheduling import SCHEDULERS, Scheduler

_WORK = 120_000
"""Limit of nodes times trials, for each of both parts."""

_MOST = 210
_LEAST = 36
"""Limits of trials of each part; if fewer are affordable, there is no exploration."""

_POLISH = 300
"""Limit of trials in the final polishing."""

_POLISH_WORK = 160_000
"""Limit of nodes times trials in the final polishing."""

_CLOSE = 1.05
"""Factor on the best time within which another scheduler's plan is improved."""

_FEW = 16
"""Number of the largest tensors that are tried one by one before groups."""

_BLIND = "on_demand"
"""Scheduler that is never better than the others for the same residencies."""


def explore(
    request: StepRequest,
    candidates: Sequence[Candidate],
    nearest: Mapping[str, Residency],
    best: SearchState,
) -> None:
    """Look for a better plan than the best of a search."""
    trials = min(_MOST, _WORK // len(request.graph.nodes))
    if len(candidates) <= _FEW or trials < _LEAST:
        return
    found = [
        SearchState(request.scheduled(name), trials) for name in schedulers(request)
    ]
    starts = list(_starts(request, candidates, nearest, best))
    for start, tried in itertools.product(starts, found):  # one rewrite per start
        tried.consider(start)
    improve(request, candidates, found, trials, best)
    last = min(found, key=lambda tried: tried.step_ms)
    if last.found and last.step_ms <= best.step_ms:
        last.allow(min(_POLISH, _POLISH_WORK // len(request.graph.nodes)))
        neighbour_search(candidates, last)
        best.offer(last.plan)


def improve(
    request: StepRequest,
    candidates: Sequence[Candidate],
    found: Iterable[SearchState],
    trials: int,
    best: SearchState,
) -> None:
    """Improve the plan of each scheduler that is close to the best one."""
    for tried in sorted(found, key=lambda tried: tried.step_ms):
        if tried.found and tried.step_ms <= _CLOSE * best.step_ms:
            tried.allow(trials)
            _improve(request, candidates, tried)
            best.offer(tried.plan)


def schedulers(request: StepRequest) -> list[str | Scheduler]:
    """Return the schedulers to try; only the request's if it names one."""
    if request.scheduler is None:
        return [name for name in SCHEDULERS.table if name != _BLIND]
    return [request.scheduler]


def _starts(
    request: StepRequest,
    candidates: Sequence[Candidate],
    nearest: Mapping[str, Residency],
    best: SearchState,
) -> Iterator[Mapping[str, Residency]]:
    """Yield the best residencies so far, the relaxation's, and rules for blocks."""
    yield best.residency
    others = (Residency.KEEP, Residency.PAGE)
    if nearest:
        for every in others:
            yield {EVERYTHING: every, **nearest}
    for rule in blockwise(request.graph, candidates):
        for every in others:
            yield {EVERYTHING: every, **rule}


def _improve(
    request: StepRequest, candidates: Sequence[Candidate], tried: SearchState
) -> None:
    while not tried.exhausted():
        if not improved(_changes(request, candidates, tried), tried):
            break


def _changes(
    request: StepRequest, candidates: Sequence[Candidate], tried: SearchState
) -> Iterator[Change]:
    """Yield changes: largest tensors, the plan's suggestions, groups, others.

    All slices of a tensor change together before single slices do.
    """
    tensors = slices_of(candidates)
    groups = sorted(tensors.values(), key=total_bytes, reverse=True)
    largest = [[c.saved.name for c in group] for group in groups]
    sliced = [names for names in largest if len(names) > 1]
    yield from same_changes(
        largest[:_FEW], RECOMPUTED_BACKWARD if sliced else tuple(Residency)
    )
    yield from suggested(tried.plan, candidates)
    yield from group_changes(request.graph, candidates)
    others = largest if sliced else largest[_FEW:]
    yield from same_changes([*others, [EVERYTHING], [PERSISTENTS]])
    yield from single_changes([*itertools.chain(*sliced)])


def improved(changes: Iterable[Change], tried: SearchState) -> bool:
    """Try changes one after another; return whether any of them helped."""
    better = False
    for change in changes:
        if tried.exhausted():
            return better
        better |= tried.consider({**tried.residency, **dict(change)})
    return better
