"""A second search, from other starts and by larger steps than the first.

The first improves the best of what policies decide, tensor by tensor. That is a good
way while few tensors have to leave. Where many do, no single one helps: so this one
begins with rules for whole blocks and with the solution of the relaxation, under each
of the schedulers, and changes groups of tensors before single ones.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.search.polish import polish
from mucudnn.passes.planning.search.suggested import suggested
from mucudnn.passes.planning.search.trials import Trials
from mucudnn.passes.residency import (
    EVERYTHING,
    PERSISTENTS,
    RECOMPUTED_BACKWARD,
    Residency,
)
from mucudnn.passes.residency.blocks import (
    blockwise,
    group_changes,
    slices_of,
    total_bytes,
)
from mucudnn.passes.residency.candidates import (
    Candidate,
    Change,
    same_changes,
    single_changes,
)
from mucudnn.passes.scheduling import SCHEDULERS, Scheduler

__all__ = ["explore", "improve", "improved", "schedulers"]

_WORK = 120_000
"""Nodes of the graph, times the trials of each of both parts."""

_MOST = 210
_LEAST = 36
"""Trials of each part; where only fewer are affordable, there are none."""

_POLISH = 300
"""Trials of the last changes."""

_POLISH_WORK = 160_000
"""Nodes of the graph, times those trials."""

_CLOSE = 1.05
"""Times the best scheduler's plan, within which another's is improved, too."""

_FEW = 16
"""Of the largest tensors, which are tried one by one before groups are."""

_BLIND = "on_demand"
"""The scheduler that no other loses to, given what it decides."""


def explore(
    request: StepRequest,
    candidates: Sequence[Candidate],
    nearest: Mapping[str, Residency],
    best: Trials,
) -> None:
    """Look for something better than the best of a search.

    Args:
        request: What is searched for.
        candidates: Its saved tensors, in order of production.
        nearest: The relaxation's solution, rounded; empty without one.
        best: What is known; what is found is offered to it.
    """
    trials = min(_MOST, _WORK // len(request.graph.nodes))
    if len(candidates) <= _FEW or trials < _LEAST:
        return
    found = [Trials(request.scheduled(name), trials) for name in schedulers(request)]
    starts = list(_starts(request, candidates, nearest, best))
    for start, tried in itertools.product(starts, found):  # each is rewritten once
        tried.consider(start)
    improve(request, candidates, found, trials, best)
    last = min(found, key=lambda tried: tried.step_ms)
    if last.found and last.step_ms <= best.step_ms:
        last.allow(min(_POLISH, _POLISH_WORK // len(request.graph.nodes)))
        polish(candidates, last)
        best.offer(last.plan)


def improve(
    request: StepRequest,
    candidates: Sequence[Candidate],
    found: Iterable[Trials],
    trials: int,
    best: Trials,
) -> None:
    """Improve what was found by each scheduler, where it is close to what is known.

    Args:
        request: What is searched for.
        candidates: Its saved tensors, in order of production.
        found: Trials of each.
        trials: How many more there may be for each scheduler.
        best: What is known; what is found is offered to it.
    """
    for tried in sorted(found, key=lambda tried: tried.step_ms):
        if tried.found and tried.step_ms <= _CLOSE * best.step_ms:
            tried.allow(trials)
            _improve(request, candidates, tried)
            best.offer(tried.plan)


def schedulers(request: StepRequest) -> list[str | Scheduler]:
    """Those worth a trial each; the one that is named, if one is."""
    if request.scheduler is None:
        return [name for name in SCHEDULERS.table if name != _BLIND]
    return [request.scheduler]


def _starts(
    request: StepRequest,
    candidates: Sequence[Candidate],
    nearest: Mapping[str, Residency],
    best: Trials,
) -> Iterator[Mapping[str, Residency]]:
    """The best that is known, the relaxation's, and rules for blocks."""
    yield best.residency
    others = (Residency.KEEP, Residency.PAGE)
    if nearest:
        for every in others:
            yield {EVERYTHING: every, **nearest}
    for rule in blockwise(request.graph, candidates):
        for every in others:
            yield {EVERYTHING: every, **rule}


def _improve(
    request: StepRequest, candidates: Sequence[Candidate], tried: Trials
) -> None:
    """Change one thing after the other, as long as it helps."""
    while not tried.exhausted():
        if not improved(_changes(request, candidates, tried), tried):
            break


def _changes(
    request: StepRequest, candidates: Sequence[Candidate], tried: Trials
) -> Iterator[Change]:
    """The largest tensors, what the best plan suggests by then, groups, and others.

    All slices of a tensor change together before any of them does alone. Trials of
    slices are few: of the largest, what most often helps comes first.
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


def improved(changes: Iterable[Change], tried: Trials) -> bool:
    """Try changes one after the other; whether any of them helped."""
    better = False
    for change in changes:
        if tried.exhausted():
            return better
        better |= tried.consider({**tried.residency, **dict(change)})
    return better
