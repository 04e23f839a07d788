"""Whether a step runs whole or in slices: what is predicted to be faster.

A split step is another graph with costs of its own. Small ones are slower, kernel by
kernel, but need less at once, and so copy and compute less again. Whole is always a
candidate. The others are cut by a limit on bytes, so that only large layers are; where
nothing couples the batch they are cut all alike instead, forward and backward one slice
at a time: gradient accumulation within one step.

Which is best is found by planning each under the budget. A candidate that takes longer
with all the memory it wants than another within the budget needs no plan.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mucudnn.errors import PlanningError
from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import exact_bytes, format_bytes
from mucudnn.passes.planning.comparison import unbounded
from mucudnn.passes.planning.cutting import (
    AUTO,
    BATCH,
    Cutting,
    Segment,
    Split,
    check_split,
    couples_batch,
    cuttings,
)
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.slice_search import search_slices
from mucudnn.passes.residency import PLANNED
from mucudnn.passes.scheduling.step_plan import StepPlan

__all__ = ["Candidate", "SplitStep", "Splitting", "plan_splitting"]

_HARDLY = 1.01
"""Times the unbounded step, up to which nothing else is tried."""


@dataclass(frozen=True, slots=True)
class SplitStep:
    """What a step is made of, whole or in slices.

    Attributes:
        graph: A training graph without updates that nothing has made in-place yet.
        finished: Makes a step of it, with updates and in its order.
        costs: What a step's nodes take; None where there is no room to measure it.
        asked: What is asked of a step that costs this: a budget, a policy.
    """

    graph: Graph = field(repr=False)
    finished: Callable[[Graph], Graph] = field(repr=False)
    costs: Callable[[Graph], Profile | None] = field(repr=False)
    asked: Callable[[Graph, Profile], StepRequest] = field(repr=False)

    def in_parts(self, parts: int | Cutting) -> Graph:
        """The step with its largest layers in so many parts; 1 for the whole one."""
        cutting = Cutting(parts) if isinstance(parts, int) else parts
        return self.finished(cutting.cut(self.graph))


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a step, planned.

    Attributes:
        cutting: Of the largest layers.
        request: The step that was asked for; None if it could not be measured.
        plan: Within the budget; None where there is none, or none was made.
        unbounded_ms: A step's time with all the memory it wants.
        least_bytes: The least budget that works.
        segments: What runs in parts.
    """

    cutting: Cutting
    request: StepRequest | None = field(repr=False)
    plan: StepPlan | None = field(repr=False)
    unbounded_ms: float = math.inf
    least_bytes: int | None = None
    segments: tuple[Segment, ...] = ()

    @property
    def parts(self) -> int:
        """In how many parts the largest layers are; 1 if the step is whole."""
        return self.cutting.parts

    @property
    def step_ms(self) -> float:
        """Predicted time of a step within the budget; infinity without a plan."""
        return math.inf if self.plan is None else self.plan.prediction.step_ms


@dataclass(frozen=True, slots=True)
class Splitting:
    """What was decided, and among what.

    Attributes:
        chosen: The fastest candidate.
        tried: All of them, the whole step first.
        unbounded_ms: The whole step's time with all the memory it wants.
        fused: Whether slices run forward and backward one at a time.
    """

    chosen: Candidate
    tried: tuple[Candidate, ...]
    unbounded_ms: float
    fused: bool

    @property
    def reason(self) -> str:
        """Why it was chosen, in a sentence."""
        whole, chosen = self.tried[0], self.chosen
        if chosen.parts == 1:
            others = [c for c in self.tried[1:] if c.plan is not None]
            if not others:
                return "whole: nothing in parts is faster"
            next_best = min(others, key=lambda c: c.step_ms)
            return f"whole: {next_best.cutting} take {self._times(next_best)}"
        fused = self._accumulates(chosen)
        kind = "the whole step" if fused else "its largest layers"
        how = ", gradients accumulated" if fused else ""
        words = f"{kind} in {chosen.cutting}{how}: {self._times(chosen)}"
        if whole.plan is None:
            return f"{words}; whole it does not fit"
        return f"{words} instead of {self._times(whole)} whole"

    @property
    def lines(self) -> tuple[str, ...]:
        """The decision, what was tried, and which segments run in parts."""
        tried = (self._line(candidate) for candidate in self.tried)
        return (self.reason, *tried, *map(str, self.chosen.segments))

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "parts": self.chosen.parts,
            "along": self.chosen.cutting.along,
            "fused": self.fused,
            "reason": self.reason,
            "tried": [
                {
                    "parts": c.parts,
                    "along": c.cutting.along,
                    "least_bytes": c.least_bytes,
                    "predicted_ms": None if c.plan is None else c.step_ms,
                    "unbounded_ms": None if c.request is None else c.unbounded_ms,
                }
                for c in self.tried
            ],
            "segments": [segment.to_json() for segment in self.chosen.segments],
        }

    def _line(self, candidate: Candidate) -> str:
        how = ", gradients accumulated" if self._accumulates(candidate) else ""
        name = f"{candidate.cutting}{how}"
        if candidate.least_bytes is None:
            return f"{name}: cannot be measured within the budget"
        words = f"{name}: at least {format_bytes(candidate.least_bytes)}"
        if candidate.plan is not None:
            return f"{words}, {self._times(candidate)}"
        if candidate.request and candidate.least_bytes > candidate.request.budget:
            return f"{words}, does not fit"
        times = candidate.unbounded_ms / self.unbounded_ms
        return f"{words}, {times:.2f}x however planned"

    def _accumulates(self, candidate: Candidate) -> bool:
        return self.fused and candidate.cutting.along == BATCH

    def _times(self, candidate: Candidate) -> str:
        return f"{candidate.step_ms / self.unbounded_ms:.2f}x of the unbounded step"


def plan_splitting(step: SplitStep, split: Split = AUTO) -> Splitting:
    """Plan a step whole and in parts, and choose what is predicted to be fastest.

    Args:
        step: What it is made of, and what is asked of it.
        split: `auto`, `none`, the number of parts of the largest layers, or `height:`
            and the number of strips.

    Raises:
        PlanningError: Nothing fits; it names the least budget of all that was tried.
        ValueError: The split is none of these.
    """
    check_split(split)
    tried: list[Candidate] = []
    for cutting in cuttings(step.graph, split):
        fastest = min((c.step_ms for c in tried), default=math.inf)
        if tried and fastest <= _HARDLY * tried[0].unbounded_ms:
            break
        tried.append(_candidate(step, cutting, fastest))
    chosen = min(tried, key=lambda c: c.step_ms)
    if chosen.plan is None:
        raise _refusal(tried)
    unbounded_ms = min(tried[0].unbounded_ms, chosen.unbounded_ms)
    fused = bool(step.graph.gradients) and not couples_batch(step.graph)
    return Splitting(chosen, tuple(tried), unbounded_ms, fused)


def _refusal(tried: Sequence[Candidate]) -> PlanningError:
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


def _candidate(step: SplitStep, cutting: Cutting, fastest: float) -> Candidate:
    """A step in parts, planned unless another is faster whatever its plan."""
    graph = step.in_parts(cutting)
    profile = step.costs(graph)
    if profile is None:
        return Candidate(cutting, None, None)
    request = step.asked(graph, profile)
    free = unbounded(graph, profile)
    wanted = free.prediction.step_ms
    segments = cutting.segments(step.graph)
    least = minimum_budget(request)
    planned = least <= request.budget and wanted < fastest
    roomy = cutting.parts == 1 or free.peak_bytes <= request.budget
    plan = _planned(request, searched=not roomy) if planned else None
    return Candidate(cutting, request, plan, wanted, least, segments)


def _planned(request: StepRequest, *, searched: bool) -> StepPlan:
    """The best plan; of a split step the search goes on from that of all slices."""
    if not searched or request.policy != PLANNED:
        return plan_step(request)
    try:
        found = search_slices(request)
    except PlanningError:
        return plan_step(request)
    others = plan_step(replace(request, seed=found.residency))
    return min(found, others, key=lambda plan: plan.prediction.step_ms)
