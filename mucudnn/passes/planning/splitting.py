"""Whether a step runs whole or in slices of the batch: what is predicted to be faster.

A split step is another graph with costs of its own. Small ones are slower, kernel by
kernel, but need less at once, and so copy and compute less again. Whole is always a
candidate. The others are cut by a limit on bytes, so that only large layers are; where
nothing couples the batch they are cut all alike instead, forward and backward one slice
at a time: gradient accumulation within one step.

Which is best is found by planning each under the budget. A candidate that takes longer
with all the memory it wants than another within the budget needs no plan.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mucudnn.arguments import an_integer
from mucudnn.errors import PlanningError
from mucudnn.ir.graph import Graph, Phase
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import exact_bytes, format_bytes
from mucudnn.passes.graph.split import split_batch
from mucudnn.passes.graph.split_axis import along_batch, batch_of, cuttable
from mucudnn.passes.graph.split_parts import largest_rows, parts_by_bytes
from mucudnn.passes.planning.comparison import unbounded
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.slice_search import search_slices
from mucudnn.passes.residency import PLANNED
from mucudnn.passes.scheduling.step_plan import StepPlan

__all__ = [
    "AUTO",
    "WHOLE",
    "Candidate",
    "Segment",
    "Split",
    "SplitStep",
    "Splitting",
    "check_split",
    "couples_batch",
    "parts_for",
    "plan_splitting",
    "segments_of",
]

AUTO: Literal["auto"] = "auto"
WHOLE: Literal["none"] = "none"

Split = Literal["auto", "none"] | int
"""Whether a step is split: as is predicted to be best, not at all, or in so many."""

_TRIED = (2, 4, 8, 16)
"""Parts of the largest layers."""

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

    def in_parts(self, parts: int) -> Graph:
        """The step with its largest layers in so many parts; 1 for the whole one."""
        if parts == 1:
            return self.finished(self.graph)
        return self.finished(split_batch(self.graph, parts_for(self.graph, parts)))


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes behind each other that are cut into the same number of parts.

    Attributes:
        phase: Of the step.
        first: The first of them.
        last: The last.
        parts: How many.
    """

    phase: Phase
    first: str
    last: str
    parts: int

    def __str__(self) -> str:
        return f"{self.phase.value}: {self.first} to {self.last} in {self.parts} parts"

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        words = {"phase": self.phase.value, "first": self.first, "last": self.last}
        return words | {"parts": self.parts}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a step, planned.

    Attributes:
        parts: Of the largest layers; 1 if the step is whole.
        request: The step that was asked for; None if it could not be measured.
        plan: Within the budget; None where there is none, or none was made.
        unbounded_ms: A step's time with all the memory it wants.
        least_bytes: The least budget that works.
        segments: What runs in parts.
    """

    parts: int
    request: StepRequest | None = field(repr=False)
    plan: StepPlan | None = field(repr=False)
    unbounded_ms: float = math.inf
    least_bytes: int | None = None
    segments: tuple[Segment, ...] = ()

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
            return f"whole: {next_best.parts} parts take {self._times(next_best)}"
        kind = "the whole step" if self.fused else "its largest layers"
        how = ", gradients accumulated" if self.fused else ""
        words = f"{kind} in {chosen.parts} parts{how}: {self._times(chosen)}"
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
            "fused": self.fused,
            "reason": self.reason,
            "tried": [
                {
                    "parts": c.parts,
                    "least_bytes": c.least_bytes,
                    "predicted_ms": None if c.plan is None else c.step_ms,
                    "unbounded_ms": None if c.request is None else c.unbounded_ms,
                }
                for c in self.tried
            ],
            "segments": [segment.to_json() for segment in self.chosen.segments],
        }

    def _line(self, candidate: Candidate) -> str:
        how = ", gradients accumulated" if self.fused else ""
        name = "whole" if candidate.parts == 1 else f"{candidate.parts} parts{how}"
        if candidate.least_bytes is None:
            return f"{name}: cannot be measured within the budget"
        words = f"{name}: at least {format_bytes(candidate.least_bytes)}"
        if candidate.plan is not None:
            return f"{words}, {self._times(candidate)}"
        if candidate.request and candidate.least_bytes > candidate.request.budget:
            return f"{words}, does not fit"
        times = candidate.unbounded_ms / self.unbounded_ms
        return f"{words}, {times:.2f}x however planned"

    def _times(self, candidate: Candidate) -> str:
        return f"{candidate.step_ms / self.unbounded_ms:.2f}x of the unbounded step"


def plan_splitting(step: SplitStep, split: Split = AUTO) -> Splitting:
    """Plan a step whole and in parts, and choose what is predicted to be fastest.

    Args:
        step: What it is made of, and what is asked of it.
        split: `auto`, `none`, or the number of parts of the largest layers.

    Raises:
        PlanningError: Nothing fits; it names the least budget of all that was tried.
        ValueError: The split is none of these.
    """
    check_split(split)
    tried: list[Candidate] = []
    for parts in _numbers(step.graph, split):
        fastest = min((c.step_ms for c in tried), default=math.inf)
        if tried and fastest <= _HARDLY * tried[0].unbounded_ms:
            break
        tried.append(_candidate(step, parts, fastest))
    chosen = min(tried, key=lambda c: c.step_ms)
    if chosen.plan is None:
        raise _refusal(tried)
    unbounded_ms = min(tried[0].unbounded_ms, chosen.unbounded_ms)
    fused = not couples_batch(step.graph)
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


def check_split(split: object) -> None:
    """Refuse what is no split.

    Raises:
        ValueError: It is another word, or a number below 1.
        TypeError: It is no word and no whole number.
    """
    if isinstance(split, str):
        if split not in (AUTO, WHOLE):
            raise ValueError(
                f"a step is split 'auto', 'none', or into a number of parts, not "
                f"{split!r}"
            )
        return
    an_integer("split", split, least=1)


def couples_batch(graph: Graph) -> bool:
    """Whether samples depend on each other before all of them are known."""
    able = cuttable(graph, along_batch(graph))
    coupled = any(
        node.traits.pieces is not None for node in graph.nodes if node.name in able
    )
    large = largest_rows(graph)
    left = (n for n in graph.nodes if n.name not in able and n.inputs)
    return coupled or any(
        graph.tensors[name].nbytes >= large for node in left for name in node.tensors
    )


def parts_for(graph: Graph, parts: int) -> Mapping[str, int] | int:
    """Parts of each node, so that the largest layers are in so many."""
    if not couples_batch(graph):
        return parts
    return parts_by_bytes(graph, largest_rows(graph) / parts, most=parts)


def _numbers(graph: Graph, split: Split) -> Iterator[int]:
    batch = batch_of(graph)
    if isinstance(split, int):
        yield min(split, batch)
        return
    yield 1
    if split == AUTO:
        yield from (parts for parts in _TRIED if parts <= batch)


def _candidate(step: SplitStep, parts: int, fastest: float) -> Candidate:
    """A step in parts, planned unless another is faster whatever its plan."""
    graph = step.in_parts(parts)
    profile = step.costs(graph)
    if profile is None:
        return Candidate(parts, None, None)
    request = step.asked(graph, profile)
    free = unbounded(graph, profile)
    wanted = free.prediction.step_ms
    segments: tuple[Segment, ...] = ()
    if parts > 1:
        segments = tuple(segments_of(step.graph, parts_for(step.graph, parts)))
    least = minimum_budget(request)
    planned = least <= request.budget and wanted < fastest
    roomy = parts == 1 or free.peak_bytes <= request.budget
    plan = _planned(request, searched=not roomy) if planned else None
    return Candidate(parts, request, plan, wanted, least, segments)


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


def segments_of(graph: Graph, parts: Mapping[str, int] | int) -> Iterator[Segment]:
    """Runs of nodes in the same number of parts, those of one part left out.

    Args:
        graph: A training graph that is not cut yet.
        parts: Of each node, or of all.
    """
    able = cuttable(graph, along_batch(graph))
    open_: Segment | None = None
    for node in graph.nodes:
        if node.name not in able:
            continue
        number = parts if isinstance(parts, int) else parts.get(node.name, 1)
        if open_ is not None and (open_.phase, open_.parts) == (node.phase, number):
            open_ = replace(open_, last=node.name)
            continue
        if open_ is not None and open_.parts > 1:
            yield open_
        open_ = Segment(node.phase, node.name, node.name, number)
    if open_ is not None and open_.parts > 1:
        yield open_
