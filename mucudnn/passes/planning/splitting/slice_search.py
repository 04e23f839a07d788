"""A search for steps in slices, from what was found for another cut of the same step.

A tensor that is cut into k slices is k tensors to decide about, and a trial of a step
in slices takes k times as long: so little is tried, and what is known is made use of.
What is good for a tensor of the whole step, or of the step in fewer slices, is mostly
good for its slices; where less memory is left for each, what was kept leaves, what left
does so over every gap, and what was computed again once is so for every use. From the
best of these changes are made, of all slices of a tensor first.
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
"""Nodes that the trials of one round may schedule together."""

_LEAST_TRIALS = 40
"""How many there are where they take more than that."""

_MOST_WORK = 210_000
"""Nodes that the trials of one round schedule together at the most."""

_MUCH = 0.15
"""Of a step, that compute waits for copies."""

_ALIKE = 24
"""Groups of tensors that are alike in all blocks, which change together at last."""

_TIGHTER = (
    (Residency.KEEP, Residency.OFFLOAD),
    (Residency.OFFLOAD, Residency.PAGE),
    (Residency.RECOMPUTE, Residency.RECOMPUTE_EACH),
    (Residency.OFFLOAD, Residency.KEEP),
)
"""What one residency may become everywhere, one after the other."""

_TIGHTEST = tuple(
    {
        Residency.KEEP: kept,
        Residency.OFFLOAD: Residency.PAGE,
        Residency.RECOMPUTE: again,
    }
    for kept in (Residency.OFFLOAD, Residency.PAGE)
    for again in RECOMPUTED_BACKWARD
)
"""What residencies become where they do not fit as they are."""


class SliceSearch:
    """The plans of one cut of a step, found round by round.

    Args:
        request: Of the step in slices, under a budget.
    """

    def __init__(self, request: StepRequest) -> None:
        self._request = request
        self._candidates = candidates_of(request)
        self._found = [Trials(request.scheduled(s), 0) for s in schedulers(request)]
        self._best = Trials(request, 0)
        nodes = len(request.graph.nodes)
        self._trials = max(min(_LEAST_TRIALS, _MOST_WORK // nodes), _WORK // nodes)

    @property
    def plan(self) -> StepPlan | None:
        """The best so far; None where nothing fits yet."""
        return self._best.plan if self._best.found else None

    @property
    def step_ms(self) -> float:
        """The best plan's; infinity without one."""
        return self._best.step_ms

    def begin(self, known: Residencies) -> None:
        """Try what is known of another cut, as it is or for less memory."""
        others = {EVERYTHING: Residency.PAGE}
        if PERSISTENTS in known:
            others[PERSISTENTS] = known[PERSISTENTS]
        start = others | carried_over(known, self._candidates)
        self._try([start])
        if not self._best.found:
            for choices in _TIGHTEST:
                self._try(
                    [{**start, PERSISTENTS: Residency.PAGE} | _with(start, choices)]
                )
        for old, new in _TIGHTER:
            best = {**self._best.residency}
            self._try([best | _with(best, {old: new})])

    def offer(self, plan: StepPlan) -> None:
        """Take a plan of the same step, to go on from it if it is better."""
        self._best.offer(plan)
        self._try([plan.residency])

    def improve(self) -> bool:
        """A round of changes of the best; whether any of them helped."""
        before = self._best.step_ms
        improve(self._request, self._candidates, self._found, self._trials, self._best)
        return self._best.step_ms < before

    def finish(self) -> bool:
        """The last changes of the best; whether any of them helped.

        Where compute waits much for copies, less of what is alike is copied first.
        """
        before = self._best.step_ms
        last = min(self._found, key=lambda tried: tried.step_ms)
        if last.found and _waits(last.plan) > _MUCH:
            last.allow(_ALIKE * len(Residency))
            improved(alike_changes(self._candidates, _ALIKE), last)
            self._best.offer(last.plan)
            return self._best.step_ms < before
        return self.improve()

    def _try(self, starts: Sequence[Residencies]) -> None:
        for start, tried in itertools.product(starts, self._found):
            if tried.consider(start, free=True):
                self._best.take_over(tried)


def _waits(plan: StepPlan) -> float:
    """Of the step, the share in which compute waits."""
    return sum(plan.prediction.stalls_ms.values()) / plan.prediction.step_ms


def carried_over(
    known: Residencies, candidates: Sequence[Candidate]
) -> dict[str, Residency]:
    """Residencies of one cut of a step, for the saved tensors of another.

    Args:
        known: Of the whole step, or of it in any number of slices.
        candidates: Saved tensors of the other, slices of a tensor in order.
    """
    others = known.get(EVERYTHING, Residency.KEEP)
    of_known: dict[str, list[str]] = {}
    for name in sorted(known, key=_index):
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


def _index(name: str) -> int:
    """Which slice of its tensor a name is of."""
    index = name.partition("@")[2]
    return int(index) if index.isdigit() else 0


def _with(
    residency: Residencies, choices: Mapping[Residency, Residency]
) -> dict[str, Residency]:
    """Residencies of tensors, some of them replaced wherever they occur."""
    return {
        name: choices.get(choice, choice)
        for name, choice in residency.items()
        if name not in (EVERYTHING, PERSISTENTS)
    }
