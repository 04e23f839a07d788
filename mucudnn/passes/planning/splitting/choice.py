"""Choose whether a step runs whole or split, by the predicted time.

A split step is another graph with costs of its own: small kernels are slower, but need
less memory at once, which saves copies and recomputation. The whole step is always a
candidate. Other candidates split only large layers, by a limit on bytes; where no
operation couples the batch, all layers are split alike, and each slice runs forward and
backward in turn: gradient accumulation within one step.

Every candidate is planned under the budget, starting from the residencies of those
before it, and the fastest is improved further. A candidate that takes longer without a
budget than another takes within it needs no plan.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.errors import PlanningError
from mucudnn.ir.sizes import exact_bytes, format_bytes
from mucudnn.passes.planning.search.collection import gc_relaxed
from mucudnn.passes.planning.splitting.candidates import Candidates, too_deep
from mucudnn.passes.planning.splitting.cutting import (
    AUTO,
    BATCH,
    Split,
    check_split,
    couples_batch,
    cuttings,
    trains,
)
from mucudnn.passes.planning.splitting.step import Candidate, SplitStep

__all__ = ["Candidate", "SplitStep", "Splitting", "plan_splitting"]


@dataclass(frozen=True, slots=True)
class Splitting:
    """Decision about a split.

    Attributes:
        chosen: The fastest candidate.
        tried: All candidates, the whole step first.
        unbounded_ms: Time without a budget of the whole step, or of the only
            candidate.
        fused: Whether each slice runs forward and backward in turn.
    """

    chosen: Candidate
    tried: tuple[Candidate, ...]
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
        every = fused or chosen.cutting.throughout
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

    def _line(self, candidate: Candidate) -> str:
        how = ", gradients accumulated" if self._accumulates(candidate) else ""
        name = f"{candidate.cutting}{how}"
        if candidate.least_bytes is None:
            return f"{name}: cannot be measured within the budget"
        budget = candidate.request.budget if candidate.request else math.inf
        beside = () if math.isinf(budget) else (int(budget),)
        words = f"{name}: at least {format_bytes(candidate.least_bytes, *beside)}"
        if candidate.plan is not None:
            return f"{words}, {self._times(candidate)}"
        if candidate.least_bytes > budget:
            return f"{words}, does not fit"
        times = candidate.unbounded_ms / self.unbounded_ms
        return f"{words}, {times:.2f}x however planned"

    def _accumulates(self, candidate: Candidate) -> bool:
        return self.fused and candidate.cutting.along == BATCH

    def _times(self, candidate: Candidate) -> str:
        first = self.tried[0].cutting
        step = "the unbounded step" if first.parts == 1 else f"{first} unbounded"
        return f"{candidate.step_ms / self.unbounded_ms:.2f}x of {step}"


@gc_relaxed()
def plan_splitting(step: SplitStep, split: Split = AUTO) -> Splitting:
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
    ways = list(cuttings(step.graph, split))
    found = Candidates(step, alone=len(ways) == 1)
    for cutting in ways:
        if not found.can_skip(cutting):
            found.draft(cutting)
    found.finish()
    tried = found.tried
    chosen = min(tried, key=lambda c: c.step_ms)
    if chosen.plan is None:
        raise _refusal(tried)
    unbounded_ms = min(tried[0].unbounded_ms, chosen.unbounded_ms)
    fused = trains(step.graph) and not couples_batch(step.graph)
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
