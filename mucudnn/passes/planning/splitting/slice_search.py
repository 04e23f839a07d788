"""Search residencies of a split step, starting from those of another split.

A tensor in k slices means k residencies, and a trial takes k times as long, so few
trials are affordable and known residencies are reused. What is good for a tensor of the
whole step, or of a step in fewer slices, is mostly good for its slices. If memory is
tighter, kept tensors are offloaded, offloaded ones are paged, and recomputation once
becomes recomputation for every use. The best of these starts is then improved, all
slices of a tensor first.
"""

import itertools
from collections.abc import Mapping, Sequence

from mucudnn.passes.graph.slicing.rows import of_whole
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.search.explore import improve, improved, schedulers
from mucudnn.passes.planning.search.trials import Trials
from mucudnn.passes.residency import (
    EVERYTHING,
    PERSISTENTS,
    RECOMPUTED_BACKWARD,
    Residency,
)
from mucudnn.passes.residency.blocks import alike_changes
from mucudnn.passes.residency.candidates import Candidate, candidates_of
from mucudnn.passes.scheduling.step_plan import StepPlan

__all__ = ["SliceSearch", "carried_over"]

Residencies = Mapping[str, Residency]

_WORK = 120_000
"""Limit of nodes scheduled by the trials of one round."""

_LEAST_TRIALS = 40
"""Trials of a round that are allowed beyond that limit."""

_MOST_WORK = 210_000
"""Hard limit of nodes scheduled by the trials of one round."""

_MUCH = 0.15
"""Fraction of the step in stalls from which less is copied in the final changes."""

_ALIKE = 24
"""Number of groups of equivalent tensors changed together in the final changes."""

_TIGHTER = (
    (Residency.KEEP, Residency.OFFLOAD),
    (Residency.OFFLOAD, Residency.PAGE),
    (Residency.RECOMPUTE, Residency.RECOMPUTE_EACH),
    (Residency.OFFLOAD, Residency.KEEP),
)
"""Replacements of one residency by another everywhere, tried one after another."""

_TIGHTEST = tuple(
    {
        Residency.KEEP: kept,
        Residency.OFFLOAD: Residency.PAGE,
        Residency.RECOMPUTE: again,
    }
    for kept in (Residency.OFFLOAD, Residency.PAGE)
    for again in RECOMPUTED_BACKWARD
)
"""Replacements of residencies that do not fit, tried one after another."""


class SliceSearch:
    """Search for a plan of one split step, round by round."""

    def __init__(self, request: StepRequest) -> None:
        self._request = request
        self._candidates = candidates_of(request)
        self._found = [Trials(request.scheduled(s), 0) for s in schedulers(request)]
        self._best = Trials(request, 0)
        nodes = len(request.graph.nodes)
        self._trials = max(min(_LEAST_TRIALS, _MOST_WORK // nodes), _WORK // nodes)

    @property
    def plan(self) -> StepPlan | None:
        """The best plan so far, or None."""
        return self._best.plan if self._best.found else None

    @property
    def step_ms(self) -> float:
        """Time of the best plan; infinity without one."""
        return self._best.step_ms

    def begin(self, known: Residencies) -> None:
        """Try known residencies of another split, unchanged and for less memory."""
        others = {EVERYTHING: Residency.PAGE}
        if PERSISTENTS in known:
            others[PERSISTENTS] = known[PERSISTENTS]
        start = others | carried_over(known, self._candidates)
        self._try([start])
        if not self._best.found:
            for choices in _TIGHTEST:
                self._try(
                    [
                        {**start, PERSISTENTS: Residency.PAGE}
                        | _with_replaced(start, choices)
                    ]
                )
        for old, new in _TIGHTER:
            best = {**self._best.residency}
            self._try([best | _with_replaced(best, {old: new})])

    def offer(self, plan: StepPlan) -> None:
        """Offer a plan of the same step as a start."""
        self._best.offer(plan)
        self._try([plan.residency])

    def improve(self) -> bool:
        """Run a round of changes; return whether any of them helped."""
        before = self._best.step_ms
        improve(self._request, self._candidates, self._found, self._trials, self._best)
        return self._best.step_ms < before

    def finish(self) -> bool:
        """Run the final changes; return whether any of them helped.

        If stalls are long, groups of equivalent tensors are copied less first.
        """
        before = self._best.step_ms
        last = min(self._found, key=lambda tried: tried.step_ms)
        stalls = last.plan.prediction.stalls_ms.values() if last.found else ()
        if sum(stalls) / last.step_ms > _MUCH:
            last.allow(_ALIKE * len(Residency))
            improved(alike_changes(self._candidates, _ALIKE), last)
            self._best.offer(last.plan)
            return self._best.step_ms < before
        return self.improve()

    def _try(self, starts: Sequence[Residencies]) -> None:
        for start, tried in itertools.product(starts, self._found):
            if tried.consider(start, free=True):
                self._best.take_over(tried)


def carried_over(
    known: Residencies, candidates: Sequence[Candidate]
) -> dict[str, Residency]:
    """Carry residencies of one split over to the saved tensors of another, in order."""
    others = known.get(EVERYTHING, Residency.KEEP)
    of_known: dict[str, list[str]] = {}
    for name in sorted(known, key=_slice_index):
        of_known.setdefault(of_whole(name), []).append(name)
    of_tensor: dict[str, list[str]] = {}
    for candidate in candidates:
        name = candidate.saved.name
        of_tensor.setdefault(of_whole(name), []).append(name)
    found = {}
    for whole, names in of_tensor.items():
        source = of_known.get(whole, [])
        for i, name in enumerate(names):
            at = i * len(source) // len(names)
            found[name] = known[source[at]] if source else others
    return found


def _slice_index(name: str) -> int:
    index = name.partition("@")[2]
    return int(index) if index.isdigit() else 0


def _with_replaced(
    residency: Residencies, choices: Mapping[Residency, Residency]
) -> dict[str, Residency]:
    """Return tensors' residencies with some choices replaced."""
    return {
        name: choices.get(choice, choice)
        for name, choice in residency.items()
        if name not in (EVERYTHING, PERSISTENTS)
    }
