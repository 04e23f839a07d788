"""A step that may be split, and a candidate split of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.splitting.cutting import Cutting, Segment
from mucudnn.passes.scheduling.step_plan import StepPlan

__all__ = ["Candidate", "SplitStep"]


@dataclass(frozen=True, slots=True)
class SplitStep:
    """A step that may be split, with the functions to complete, cost and plan it.

    Attributes:
        graph: A training graph without updates, before in-place rewriting.
        finished: Function that completes a graph by updates and order.
        costs: Function that profiles a step; None if it cannot be measured.
        asked: Function that makes the planning request of a step and its profile.
    """

    graph: Graph = field(repr=False)
    finished: Callable[[Graph], Graph] = field(repr=False)
    costs: Callable[[Graph], Profile | None] = field(repr=False)
    asked: Callable[[Graph, Profile], StepRequest] = field(repr=False)

    def in_parts(self, parts: int | Cutting) -> Graph:
        """Return the complete step, split into parts; 1 for the whole step."""
        cutting = Cutting(parts) if isinstance(parts, int) else parts
        return self.finished(cutting.cut(self.graph))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate split of a step.

    Attributes:
        cutting: The way the step is split.
        request: Its planning request; None if it could not be measured.
        plan: Plan within the budget; None if infeasible or not planned.
        unbounded_ms: Time of a step without a budget.
        least_bytes: Minimum feasible budget.
        segments: Runs of nodes that are split.
        kept_whole: Message on unsplit operations; empty if all are split.
    """

    cutting: Cutting
    request: StepRequest | None = field(repr=False)
    plan: StepPlan | None = field(repr=False)
    unbounded_ms: float = math.inf
    least_bytes: int | None = None
    segments: tuple[Segment, ...] = ()
    kept_whole: str = ""

    @property
    def parts(self) -> int:
        """Number of parts of the largest layers; 1 for the whole step."""
        return self.cutting.parts

    @property
    def step_ms(self) -> float:
        """Predicted time of a step within the budget; infinity without a plan."""
        return math.inf if self.plan is None else self.plan.prediction.step_ms
