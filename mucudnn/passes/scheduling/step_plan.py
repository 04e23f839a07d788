"""A planned step: its schedule, what it was made of, and what it will cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.residency import Residency
from mucudnn.ir.schedule import Schedule
from mucudnn.notebook import drawn
from mucudnn.passes.scheduling.intervals import ResidencyInterval
from mucudnn.passes.simulate import Prediction

__all__ = ["StepPlan"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A training step under a budget.

    Attributes:
        schedule: What to run.
        intervals: What the schedule was made of.
        plans: Convolution node -> how to run it.
        residency: What was decided about tensors.
        prediction: What it will cost.
        policy: Who decided.
        scheduler: Who timed the copies.
        budget: Bytes that were given.
    """

    schedule: Schedule
    intervals: Sequence[ResidencyInterval]
    plans: Mapping[str, ConvPlan]
    residency: Mapping[str, Residency]
    prediction: Prediction
    policy: str
    scheduler: str
    budget: float

    @property
    def peak_bytes(self) -> int:
        """The most device memory in use at once, parameters and state included."""
        return self.schedule.peak_bytes

    def _repr_html_(self) -> str:
        """For notebooks."""
        return drawn("step_plan", self)

    @property
    def recomputed(self) -> int:
        """How many nodes run a second time or more often."""
        return sum("~" in node.name for node in self.schedule.graph.nodes)
