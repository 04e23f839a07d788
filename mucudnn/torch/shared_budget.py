"""One budget for the graphs that a model falls into where Dynamo breaks it.

While one of them runs, those before it hold what their backward passes need, and those
behind it have parameters and gradients: of each no more than its own peak. So peaks
that add up to the budget are a promise for all of them.

A graph is planned when it is first called, and what follows a break is not known then.
So a graph that ends in one takes a third of what is left, or what it cannot do
without; the last one takes the rest. The parts that Dynamo cuts a model in
DistributedDataParallel into are all known: each takes as much of what is left as its
tensors are of those of the parts that are left.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from mucudnn.errors import PlanningError
from mucudnn.ir.sizes import exact_bytes, format_bytes

__all__ = ["GraphSource", "SharedBudget"]

_SHARE = 1 / 3
"""How much of what is left a graph takes that ends in a break."""

Planned = TypeVar("Planned")


@dataclass(frozen=True)
class GraphSource:
    """Where a graph comes from.

    Attributes:
        name: What it is called.
        function: The function that it is part of; another version of it is the same.
        ends: The user's line where a break ends it; None if none does.
        resumes: Whether it begins behind a break.
        share: How much of what is left it takes if it ends in a break.
    """

    name: str
    function: str
    ends: str | None = None
    resumes: bool = False
    share: float = _SHARE


@dataclass(frozen=True)
class _Part:
    """What one graph has in use at most."""

    source: GraphSource
    model: int
    peak: int


class SharedBudget:
    """Divides a budget among the graphs of each model.

    Args:
        budget: Bytes for all graphs of one model together.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self._parts: dict[str, _Part] = {}
        self._last: _Part | None = None
        self._models = 0

    @property
    def peak_bytes(self) -> int:
        """All peaks together, each of its graph's largest version."""
        return sum(part.peak for part in self._parts.values())

    def apart(self, source: GraphSource) -> str:
        """That several models may need more than the budget together; empty if not.

        Args:
            source: The last graph of theirs.
        """
        models = {part.model for part in self._parts.values()}
        if len(models) == 1 or self.peak_bytes <= self.budget:
            return ""
        first = next(iter(self._parts.values())).source.name
        return (
            f"there are several models ({first}; {source.name}), and each keeps the "
            f"budget of {format_bytes(int(self.budget), self.peak_bytes)} for itself: "
            f"together up to {format_bytes(self.peak_bytes, int(self.budget))} so far"
        )

    def plan(self, source: GraphSource, planned: Callable[[float], Planned]) -> Planned:
        """A graph in its share of the budget.

        Args:
            source: Where it comes from.
            planned: Plans it within so many bytes.

        Raises:
            PlanningError: It does not fit, by itself or beside the others; says a
                budget that works.
        """
        others = self._others(source)
        left = max(0.0, self.budget - sum(part.peak for part in others))
        try:
            if source.ends is None:
                return planned(left)
            try:
                return planned(left * source.share)
            except PlanningError as e:
                if e.least_bytes is None:
                    raise
                return planned(min(e.least_bytes, left))
        except PlanningError as e:
            if not others or e.least_bytes is None:
                raise
            raise self._refusal(source, others, e.least_bytes, e.node) from None

    def note(self, source: GraphSource, peak: int) -> None:
        """Remember what a graph has in use at most."""
        model = self._model(source)
        self._models = max(self._models, model + 1)
        known = self._parts.get(source.function)
        if known is not None and known.model == model:
            peak = max(peak, known.peak)
        self._last = self._parts[source.function] = _Part(source, model, peak)

    def _model(self, source: GraphSource) -> int:
        """Which model a graph is of: that of the graph before it behind a break."""
        known, last = self._parts.get(source.function), self._last
        if known is not None:
            return known.model
        if last is not None and (source.resumes or last.source.ends is not None):
            return last.model
        return self._models

    def _others(self, source: GraphSource) -> list[_Part]:
        """The graphs of the same model, in the order in which they came."""
        model = self._model(source)
        every = self._parts.items()
        return [p for f, p in every if p.model == model and f != source.function]

    def _refusal(
        self, source: GraphSource, others: list[_Part], least: int, node: str | None
    ) -> PlanningError:
        """Why there is no plan, and with which budget there would be one.

        A graph that ends in a break leaves of it all but what it cannot do without, or
        all but its share: whichever is less.
        """
        needed = least
        for part in reversed(others):
            shared = math.ceil(needed / (1 - part.source.share))
            needed = max(part.peak + needed, shared)
        ends = dict.fromkeys(p.source.ends or p.source.name for p in others)
        breaks = ", ".join(ends)
        used = sum(part.peak for part in others)
        return PlanningError(
            f"{source.name} is one of {len(others) + 1} graphs that share the budget "
            f"of {exact_bytes(int(self.budget))}, with graph breaks at {breaks}: up to "
            f"{exact_bytes(used)} of it are the other graphs', and it needs "
            f"{exact_bytes(least)}; a budget of {exact_bytes(needed)} works"
            f"{'' if source.ends is None else ' up to its end'}. "
            "torch.compile with fullgraph=True says why a graph ends",
            node=node,
            short_by=needed - int(self.budget),
            least_bytes=needed,
        )
