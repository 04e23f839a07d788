"""A step that may be split: what it is made of, and the ways to run it."""

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
        kept_whole: What does not, and why; empty if all does.
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
        """In how many parts the largest layers are; 1 if the step is whole."""
        return self.cutting.parts

    @property
    def step_ms(self) -> float:
        """Predicted time of a step within the budget; infinity without a plan."""
        return math.inf if self.plan is None else self.plan.prediction.step_ms
