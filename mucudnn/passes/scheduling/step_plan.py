"""A planned step: its schedule, the decisions behind it, and its predicted cost."""

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
    """A planned training step under a budget.

    Attributes:
        schedule: The instructions to run.
        intervals: Residency intervals of the schedule.
        plans: Plan of each convolution node.
        residency: Residencies of tensors.
        prediction: The simulated step.
        policy: Name of the policy.
        scheduler: Name of the scheduler.
        budget: Budget in bytes.
        least_ms: Lower bound of any plan within the budget; None if not computed.
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
        """Relative gap between the predicted time and the lower bound."""
        if not self.least_ms:
            return None
        return max(0.0, self.prediction.step_ms / self.least_ms - 1)

    @property
    def peak_bytes(self) -> int:
        """Peak of device memory in bytes, parameters and state included."""
        return self.schedule.peak_bytes

    @property
    def profile(self) -> Profile:
        """Profile of the schedule's graph, with the times of the convolution plans."""
        return self.prediction.profile

    @property
    def state_bytes(self) -> int:
        """Bytes of resident parameters and state."""
        return state_bytes(self.schedule.graph, self.schedule.resident)

    def with_intervals(self, intervals: Sequence[ResidencyInterval]) -> "StepPlan":
        """Return the step with other residency intervals, simulated again."""
        old = self.schedule
        peak = self._peak(intervals, old.workspaces)
        schedule = emit(old.graph, intervals, old.workspaces, peak, old.hosted)
        prediction = simulate(schedule, self.profile)
        return replace(
            self, schedule=schedule, intervals=intervals, prediction=prediction
        )

    def with_plans(self, plans: Mapping[str, ConvPlan]) -> "StepPlan":
        """Return the step with other convolution plans, simulated again."""
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
        """Return a summary such as `StepPlan(planned, timed: 2.0 GiB at most, …)`."""
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
        return drawn("step_plan", self)

    @property
    def recomputed(self) -> int:
        """Number of recomputed nodes."""
        return sum("~" in node.name for node in self.schedule.graph.nodes)
