"""Search for the fastest way to cut a step, from one candidate to the next.

A planning trial of a step in k slices takes k times as long as one of the whole step,
so the whole step is planned first, and its residencies are carried over. The program of
`planning/program.py` is another start: it treats the slices of a tensor alike.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mucudnn.errors import PlanningError
from mucudnn.ir.sizes import exact_bytes, format_bytes
from mucudnn.passes.graph.split import of_whole
from mucudnn.passes.planning.climbing import Climb, SearchState, changes_of, try_changes
from mucudnn.passes.planning.cutting import (
    AUTO,
    BATCH,
    Cutting,
    Split,
    SplitCandidate,
    SplitStep,
    check_split,
    couples_batch,
    cuttings,
    trains,
)
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step, unbounded
from mucudnn.passes.planning.program import fill
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.search import schedulers, search
from mucudnn.passes.residency import (
    EVERYTHING,
    PERSISTENTS,
    PLANNED,
    RECOMPUTED_BACKWARD,
    Residency,
)
from mucudnn.passes.residency.candidates import Candidate, alike_changes
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.processes import gc_relaxed

_HARDLY_SLOWER = 1.01
"""Factor on the fastest candidate within which slices are improved. Their start has all
that is known of the others, so that first improvements are small."""

_HARDLY = 1.01
"""Slowdown over the step without a budget up to which nothing else is tried."""

_TIGHT = 1.5
"""Factor on the least bytes of the whole step below which it is mostly faster in parts:
it is planned like slices at first, from its plan with so many times more memory."""

_NEAR = 1.5
"""Factor on the fastest candidate up to which it gets the full search after all. For
ResNet-50 in bfloat16 within 2 GiB, that plan is 1.7 times as fast as the first one."""

_MOST_NODES = 20_000
"""Limit of nodes of all candidates, beyond which none is added to one that fits."""


def too_deep(tried: Sequence[SplitCandidate]) -> bool:
    """Return whether still more parts would have too many nodes to plan.

    `tried` are the candidates so far, those with fewer parts first.
    """
    nodes = [len(c.request.graph.nodes) for c in tried if c.request is not None]
    return bool(nodes) and sum(nodes) + nodes[-1] > _MOST_NODES


Tried = dict[Cutting, SplitCandidate]
"""Split candidates of a step, in the order of planning."""

Searches = dict[Cutting, "SliceSearch"]
"""Searches of the candidates in slices that have a plan."""


def _can_skip(cutting: Cutting, tried: Tried, searches: Searches) -> bool:
    """Return whether a cutting is unlikely to be faster than all before.

    None can be much faster than the whole step without a budget. If more parts were
    slower than fewer, still more are slower still. For very deep networks the first
    candidate that fits is used.
    """
    if not tried:
        return False
    first, *_ = tried.values()
    fastest = _fastest_ms(tried)
    if math.isfinite(fastest) and too_deep([*tried.values()]):
        return True
    alike = [c for w, c in tried.items() if cutting.like(w) and w.parts > 1]
    planned = [w for w in searches if cutting.like(w) and w.parts > 1]
    slower = len(planned) > 1 and alike[-1].step_ms > fastest
    bound = first.unbounded_ms  # infinite if it could not be measured
    return slower or (math.isfinite(bound) and fastest <= _HARDLY * bound)


def _tight(candidate: SplitCandidate) -> bool:
    """Return whether a whole step has little more than its least bytes."""
    whole, least = candidate.parts == 1, candidate.least_bytes
    if not whole or least is None or candidate.request is None:
        return False
    return candidate.request.policy == PLANNED and (
        candidate.request.budget < _TIGHT * least
    )


def _fastest_ms(tried: Tried) -> float:
    return min((c.step_ms for c in tried.values()), default=math.inf)


def _candidate(
    step: SplitStep, cutting: Cutting, tried: Tried, searches: Searches
) -> SplitCandidate:
    """Return a candidate, with a plan unless it is known to be slower."""
    graph = step.in_parts(cutting)
    profile = step.costs(graph)
    if profile is None:
        return SplitCandidate(cutting, None, None)
    request = step.request(graph, profile)
    free = unbounded(graph, profile)
    wanted = free.prediction.step_ms
    segments = cutting.segments(step.graph)
    # Of a candidate that is slower however planned, its bytes do not matter.
    least = minimum_budget(request) if wanted < _fastest_ms(tried) else None
    kept = cutting.kept_whole(step.graph)
    found = SplitCandidate(cutting, request, None, wanted, least, segments, kept)
    if _tight(found) and least is not None:
        searches[cutting] = SliceSearch(request, least)
    if least is None or least > request.budget:
        return found
    # Plan it; slices, and a whole step that hardly fits, start from known residencies.
    if free.peak_bytes <= request.budget or request.policy != PLANNED:
        return replace(found, plan=plan_step(request))
    if cutting.parts == 1 and not _tight(found):
        return replace(found, plan=search(request))
    slices = searches[cutting] = searches.get(cutting) or SliceSearch(request)
    slices.fill()
    if (known := _known_residencies(tried, searches)) is not None:
        slices.begin(known)
    if slices.plan is None:
        slices.offer(search(request, thorough=False))
    # A whole step that hardly fits waits for the others; see `plan_splitting`.
    if cutting.parts > 1 and slices.step_ms < _HARDLY_SLOWER * _fastest_ms(tried):
        slices.improve()
    return replace(found, plan=slices.plan or plan_step(request))


def _known_residencies(
    tried: Tried, searches: Searches
) -> Mapping[str, Residency] | None:
    """Return residencies of the best plan, or of the whole step in more memory.

    Those of a whole step that hardly fits are no good start for slices.
    """
    others = [c for c in tried.values() if c.plan is not None and not _tight(c)]
    best = min(others, key=lambda c: c.step_ms, default=None)
    if best is not None and best.plan is not None:
        return best.plan.residency
    tight = searches.get(Cutting(1))
    return None if tight is None else tight.in_more_memory


# Choose whether a step runs whole or split, by the predicted time.
#
# A split step is another graph with costs of its own: small kernels are slower, but
# need less memory at once, which saves copies and recomputation. The whole step is
# always a candidate. Other candidates split only large layers, by a limit on bytes;
# where no operation couples the batch, all layers are split alike, and each slice runs
# forward and backward in turn: gradient accumulation within one step.
#
# Every candidate is planned under the budget, starting from the residencies of those
# before it, and the fastest is improved further. A candidate that takes longer without
# a budget than another takes within it needs no plan.


@dataclass(frozen=True, slots=True)
class SplitDecision:
    """Decision about a split.

    Attributes:
        chosen: The fastest candidate.
        tried: All candidates, the whole step first.
        unbounded_ms: Time without a budget of the whole step, or of the only
            candidate.
        fused: Whether each slice runs forward and backward in turn.
    """

    chosen: SplitCandidate
    tried: tuple[SplitCandidate, ...]
    unbounded_ms: float
    fused: bool

    @property
    def reason(self) -> str:
        """The reason for the decision, in a sentence."""
        whole, chosen = self.tried[0], self.chosen
        if chosen.parts == 1:
            others = [c for c in self.tried[1:] if c.plan is not None]
            if not others:
                if too_deep(self.tried):
                    return "whole: it is too deep to be planned in parts as well"
                return "whole: nothing in parts is faster"
            next_best = min(others, key=lambda c: c.step_ms)
            return f"whole: {next_best.cutting} take {self._times(next_best)}"
        fused = self._accumulates(chosen)
        cutting = chosen.cutting
        every = fused or cutting.throughout or cutting.strided
        kind = "the whole step" if every else "its largest layers"
        how = ", gradients accumulated" if fused else ""
        words = f"{kind} in {chosen.cutting}{how}: {self._times(chosen)}"
        if whole.parts > 1:  # the whole step was not a candidate
            return words
        if whole.plan is None:
            return f"{words}; whole it does not fit"
        return f"{words} instead of {self._times(whole)} whole"

    @property
    def lines(self) -> tuple[str, ...]:
        """The reason, all candidates, and the segments that run in parts."""
        tried = (self._line(candidate) for candidate in self.tried)
        parts = (*map(str, self.chosen.segments), self.chosen.kept_whole)
        return (self.reason, *tried, *filter(None, parts))

    def to_json(self) -> dict[str, Any]:
        """Return the decision as JSON-compatible values."""
        return {
            "parts": self.chosen.parts,
            "along": self.chosen.cutting.along,
            "throughout": self.chosen.cutting.throughout,
            "fused": self.fused,
            "reason": self.reason,
            "tried": [
                {
                    "parts": c.parts,
                    "along": c.cutting.along,
                    "throughout": c.cutting.throughout,
                    "least_bytes": c.least_bytes,
                    "predicted_ms": None if c.plan is None else c.step_ms,
                    "unbounded_ms": None if c.request is None else c.unbounded_ms,
                }
                for c in self.tried
            ],
            "kept_whole": self.chosen.kept_whole,
            "segments": [segment.to_json() for segment in self.chosen.segments],
        }

    def _line(self, candidate: SplitCandidate) -> str:
        how = ", gradients accumulated" if self._accumulates(candidate) else ""
        name = f"{candidate.cutting}{how}"
        if candidate.request is None:
            return f"{name}: cannot be measured within the budget"
        if candidate.least_bytes is None:
            times = candidate.unbounded_ms / self.unbounded_ms
            return f"{name}: {times:.2f}x however planned"
        budget = candidate.request.budget
        beside = () if math.isinf(budget) else (int(budget),)
        words = f"{name}: at least {format_bytes(candidate.least_bytes, *beside)}"
        if candidate.plan is not None:
            return f"{words}, {self._times(candidate)}"
        return f"{words}, does not fit"

    def _accumulates(self, candidate: SplitCandidate) -> bool:
        return self.fused and candidate.cutting.along == BATCH

    def _times(self, candidate: SplitCandidate) -> str:
        first = self.tried[0].cutting
        step = "the unbounded step" if first.parts == 1 else f"{first} unbounded"
        return f"{candidate.step_ms / self.unbounded_ms:.2f}x of {step}"


@gc_relaxed()
def plan_splitting(step: SplitStep, split: Split = AUTO) -> SplitDecision:
    """Plan a step whole and split, and choose the candidate predicted to be fastest.

    Args:
        step: The step.
        split: `auto`, `none`, the number of parts of the largest layers, or `height:`
            and the number of spatial tiles.

    Raises:
        PlanningError: Nothing fits; has the minimum feasible budget of all candidates.
        ValueError: The split is invalid.
    """
    check_split(split)
    by_cutting: Tried = {}
    searches: Searches = {}
    for cutting in list(cuttings(step.graph, split)):
        if not _can_skip(cutting, by_cutting, searches):
            by_cutting[cutting] = _candidate(step, cutting, by_cutting, searches)
    # Search for a plan of a whole step that hardly fits; improve the fastest slices.
    best = min(by_cutting.values(), key=lambda c: c.step_ms)
    whole = by_cutting.get(Cutting(1), best)
    if whole.plan is not None and whole.request is not None and _tight(whole):
        tight = searches[whole.cutting]
        if tight.step_ms <= _NEAR * best.step_ms:
            tight.offer(search(whole.request))
        by_cutting[whole.cutting] = replace(whole, plan=tight.plan or whole.plan)
    slices = searches.get(best.cutting) if best.parts > 1 else None
    if slices is not None and slices.finish():
        by_cutting[best.cutting] = replace(best, plan=slices.plan)
    tried = [*by_cutting.values()]
    chosen = min(tried, key=lambda c: c.step_ms)
    if chosen.plan is None:
        raise _refusal(tried)
    unbounded_ms = min(tried[0].unbounded_ms, chosen.unbounded_ms)
    fused = trains(step.graph) and not couples_batch(step.graph)
    return SplitDecision(chosen, tuple(tried), unbounded_ms, fused)


def _refusal(tried: Sequence[SplitCandidate]) -> PlanningError:
    sizes = [c.least_bytes for c in tried if c.least_bytes is not None]
    asked = next((int(c.request.budget) for c in tried if c.request), 0)
    if not sizes:
        return PlanningError("the step cannot be measured within its budget")
    least = min(sizes)
    words = (
        f"neither whole nor in parts does the step fit {exact_bytes(asked)}; the least "
        f"budget that works is {exact_bytes(least)}"
    )
    return PlanningError(words, short_by=least - asked, least_bytes=least)


# Search residencies of a split step, starting from those of another split and from the
# solutions of the linear program.
#
# A tensor in k slices means k residencies, and a trial takes k times as long, so few
# trials are affordable and known residencies are reused. What is good for a tensor of
# the whole step, or of a step in fewer slices, is mostly good for its slices. If memory
# is tighter, kept tensors are offloaded, offloaded ones are paged, and recomputation
# once becomes recomputation for every use. The best of these starts is then improved,
# all slices of a tensor first.


Residencies = Mapping[str, Residency]

_WORK = 120_000
"""Limit of nodes scheduled by the trials of one round."""

_LEAST_TRIALS = 40
"""Trials of a round that are allowed beyond that limit."""

_MOST_WORK = 210_000
"""Hard limit of nodes scheduled by the trials of one round."""

_AS_FAST = 1.05
"""Factor on the best time within which another scheduler's plan is improved."""

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
    """Search for a plan of one step, mostly a split one, round by round."""

    def __init__(self, request: StepRequest, least_bytes: int = 0) -> None:
        self._request = request
        self._enough = int(_TIGHT * max(request.budget, least_bytes))
        self._candidates = request.candidates
        changes = list(changes_of(request.graph, self._candidates, mixed=True))
        self._climbs = [
            Climb(request.scheduled(s), changes) for s in schedulers(request)
        ]
        self._best = SearchState(request)
        nodes = len(request.graph.nodes)
        self._trials = max(min(_LEAST_TRIALS, _MOST_WORK // nodes), _WORK // nodes)

    @property
    def plan(self) -> StepPlan | None:
        """The best plan so far, or None."""
        return self._best.plan if self._best.found else None

    @property
    def step_ms(self) -> float:
        """Time of the best plan so far; infinity without one."""
        return self._best.step_ms

    @cached_property
    def in_more_memory(self) -> Residencies:
        """Residencies of a short search with more memory, in which the step fits."""
        return search(self._request.within(self._enough), thorough=False).residency

    def fill(self) -> None:
        """Try the solutions of the program."""
        _, rounded = fill(self._request, self._best)
        for residency in rounded:
            self._try(residency)

    def begin(self, known: Residencies) -> None:
        """Try known residencies of another split, unchanged and for less memory."""
        others = {EVERYTHING: Residency.PAGE}
        if PERSISTENTS in known:
            others[PERSISTENTS] = known[PERSISTENTS]
        start = others | carried_over(known, self._candidates)
        self._try(start)
        if not self._best.found:
            for choices in _TIGHTEST:
                paged = {**start, PERSISTENTS: Residency.PAGE}
                self._try(paged | _with_replaced(start, choices))
        for old, new in _TIGHTER:
            best = {**self._best.residency}
            self._try(best | _with_replaced(best, {old: new}))

    def offer(self, plan: StepPlan) -> None:
        """Offer a plan of the same step as a start."""
        self._best.offer(plan)
        self._try(plan.residency)

    def improve(self) -> bool:
        """Run a round of changes; return whether any of them helped."""
        before = self._best.step_ms
        for climb in sorted(self._climbs, key=lambda climb: climb.step_ms):
            if climb.state.found and climb.step_ms <= _AS_FAST * self._best.step_ms:
                climb.run(self._trials)
                self._best.take_over(climb.state)
        return self._best.step_ms < before

    def finish(self) -> bool:
        """Run the final changes; return whether any of them helped.

        If stalls are long, groups of equivalent tensors are copied less first.
        """
        before = self._best.step_ms
        last = min(self._climbs, key=lambda climb: climb.step_ms).state
        stalls = last.plan.prediction.stalls_ms.values() if last.found else ()
        if sum(stalls) / last.step_ms > _MUCH:
            try_changes(alike_changes(self._candidates, _ALIKE), last)
            self._best.offer(last.plan)
            return self._best.step_ms < before
        return self.improve()

    def _try(self, start: Residencies) -> None:
        for climb in self._climbs:
            if climb.state.consider(start):
                self._best.take_over(climb.state)


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
