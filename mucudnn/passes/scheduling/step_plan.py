"""A planned step: its schedule, what it was made of, and what it will cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.profile import Profile
from mucudnn.ir.residency import Residency
from mucudnn.ir.schedule import Schedule
from mucudnn.ir.sizes import format_bytes
from mucudnn.notebook import drawn
from mucudnn.passes.scheduling.costs import state_bytes, timed_by, workspaces_of
from mucudnn.passes.scheduling.intervals import (
    ResidencyInterval,
    emit,
    least_occupancy,
)
from mucudnn.passes.simulate import Prediction, simulate

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
        least_ms: No plan within the budget is faster, of any residencies; None where
            that was not asked.
    """

    schedule: Schedule
    intervals: Sequence[ResidencyInterval]
    plans: Mapping[str, ConvPlan]
    residency: Mapping[str, Residency]
    prediction: Prediction
    policy: str
    scheduler: str
    budget: float
    least_ms: float | None = None

    @property
    def gap(self) -> float | None:
        """By which share of `least_ms` the step is slower at most than the best one."""
        if not self.least_ms:
            return None
        return max(0.0, self.prediction.step_ms / self.least_ms - 1)

    @property
    def peak_bytes(self) -> int:
        """The most device memory in use at once, parameters and state included."""
        return self.schedule.peak_bytes

    @property
    def profile(self) -> Profile:
        """Times of the schedule's graph, of its convolutions as they are planned."""
        return self.prediction.profile

    @property
    def state_bytes(self) -> int:
        """Parameters and state that never leave."""
        return state_bytes(self.schedule.graph, self.schedule.resident)

    def with_intervals(self, intervals: Sequence[ResidencyInterval]) -> "StepPlan":
        """The same with other residency intervals, and what it costs then."""
        old = self.schedule
        peak = self._peak(intervals, old.workspaces)
        schedule = emit(old.graph, intervals, old.workspaces, peak, old.hosted)
        prediction = simulate(schedule, self.profile)
        return replace(
            self, schedule=schedule, intervals=intervals, prediction=prediction
        )

    def with_plans(self, plans: Mapping[str, ConvPlan]) -> "StepPlan":
        """The same with other plans of its convolutions, and what it costs then."""
        profile = timed_by(self.profile, plans)
        workspaces = workspaces_of(profile, plans)
        peak = self._peak(self.intervals, workspaces)
        schedule = replace(self.schedule, workspaces=workspaces, peak_bytes=peak)
        prediction = simulate(schedule, profile)
        return replace(self, schedule=schedule, plans=plans, prediction=prediction)

    def _peak(
        self, intervals: Sequence[ResidencyInterval], workspaces: Mapping[str, int]
    ) -> int:
        scratch = [workspaces.get(n.name, 0) for n in self.schedule.graph.nodes]
        return least_occupancy(intervals, scratch, self.state_bytes, 0).peak()[0]

    def __repr__(self) -> str:
        """Such as `StepPlan(planned, timed: 2.0 GiB at most, 9 ms, …)`."""
        return (
            f"StepPlan({self.policy}, {self.scheduler}: "
            f"{format_bytes(self.peak_bytes)} at most, "
            f"{self.prediction.step_ms:.3g} ms, "
            f"{format_bytes(self.prediction.out_bytes)} out, "
            f"{self.recomputed} nodes again"
            + ("" if self.gap is None else f", at most {self.gap:.1%} above the best")
            + ")"
        )

    def _repr_html_(self) -> str:
        """For notebooks."""
        return drawn("step_plan", self)

    @property
    def recomputed(self) -> int:
        """How many nodes run a second time or more often."""
        return sum("~" in node.name for node in self.schedule.graph.nodes)
