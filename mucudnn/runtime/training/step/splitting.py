"""Split a step into slices of the batch or strips: as configured, or by measurement."""

from dataclasses import replace

from mucudnn.errors import OutOfMemoryError, PlanningError
from mucudnn.ir.graph import Graph
from mucudnn.ir.loss_scaling import DynamicLossScale
from mucudnn.ir.optimizers import Optimizer
from mucudnn.ir.profile import Profile
from mucudnn.passes.graph.optimizer_updates import When, with_updates
from mucudnn.passes.ordering import Order, ordered
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.splitting.choice import (
    SplitStep,
    Splitting,
    plan_splitting,
)
from mucudnn.passes.planning.splitting.cutting import (
    Segment,
    Split,
    check_split,
    cutting_of,
)
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.runtime.profiling.profiler import OnNode, profile
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["SplitChooser"]


class SplitChooser:
    """Splits a training graph, and records the decision.

    Args:
        split: `auto`, `none`, the number of parts of the largest layers, `height`, or
            `height:4` for so many strips.
        tuner: Measures, for `auto` and `height`.
        budget: Budget of the step; without one, `auto` and `height` do not split.

    Attributes:
        decision: The decision and its alternatives; None where there was no choice.
        profile: Profile of the chosen step, if it was measured.
        plan: Plan of the chosen step, if it was planned.
        segments: The nodes that run in parts.
    """

    def __init__(
        self,
        split: Split,
        tuner: Tuner,
        budget: MemoryBudget | None,
        optimizer: Optimizer,
        *,
        when: When,
        scaling: DynamicLossScale | None,
        order: str | Order,
        progress: OnNode | None,
    ) -> None:
        check_split(split)
        self.decision: Splitting | None = None
        self.profile: Profile | None = None
        self.plan: StepPlan | None = None
        self.segments: tuple[Segment, ...] = ()
        self._split, self._tuner, self._budget = split, tuner, budget
        self._optimizer, self._when, self._order = optimizer, when, order
        self._scaling, self._progress = scaling, progress
        self._unmeasured: OutOfMemoryError | PlanningError | None = None

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph in parts, or unchanged.

        Raises:
            PlanningError: The step does not fit the budget, whole or in parts.
        """
        cutting = cutting_of(graph, self._split)
        if cutting is None:
            if self._budget is None:
                return graph
            step = SplitStep(graph, self._with_updates, self._costs, self._request)
            try:
                self.decision = plan_splitting(step, self._split)
            except PlanningError as e:
                if e.least_bytes is not None or self._unmeasured is None:
                    raise
                words = f"{e}, whole or in parts; in the last way that was tried"
                raise PlanningError(
                    f"{words}, {self._unmeasured}"
                ) from self._unmeasured
            chosen = self.decision.chosen
            cutting, request, self.plan = chosen.cutting, chosen.request, chosen.plan
            self.profile = None if request is None else request.profile
        self.segments = cutting.segments(graph)
        return cutting.cut(graph)

    def _with_updates(self, graph: Graph) -> Graph:
        step = with_updates(
            graph, self._optimizer, when=self._when, scaling=self._scaling
        )
        return ordered(self._order, step)

    def _costs(self, graph: Graph) -> Profile | None:
        memory = None if self._budget is None else self._budget.nbytes
        try:
            return profile(self._tuner, graph, memory=memory, progress=self._progress)
        except (OutOfMemoryError, PlanningError) as e:
            self._unmeasured = e
            return None

    def _request(self, graph: Graph, costs: Profile) -> StepRequest:
        budget = self._budget
        asked = StepRequest(graph, costs)
        if budget is None:
            return asked
        return replace(
            asked,
            budget=budget.nbytes,
            policy=budget.policy,
            scheduler=budget.scheduler,
            convolutions=(
                "dynamic" if budget.convolutions == "fixed" else budget.convolutions
            ),
        )
