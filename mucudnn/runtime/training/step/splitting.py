"""A trainer's step in slices or strips: by a number, or as is measured to be best."""

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

__all__ = ["Divider"]


class Divider:
    """Cuts a training graph; remembers why.

    Args:
        split: `auto`, `none`, the number of parts of the largest layers, `height`, or
            `height:4` for so many strips.
        tuner: Measures, for `auto` and `height`.
        budget: What the step is planned for; without one these leave it whole.
        optimizer: Of the step.
        when: Whether its updates come early or late.
        scaling: How the scale of its loss changes, if it does.
        order: In which order the step runs.
        progress: Called while a step is measured.

    Attributes:
        decision: What was decided among what; None where there was nothing to decide.
        profile: What the chosen step costs, if it was measured.
        plan: How it keeps its budget, if it was planned.
        segments: What runs in parts.

    Raises:
        ValueError: The split is none of these.
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
        """The graph in parts, or as it is.

        Raises:
            PlanningError: Neither whole nor in parts does it fit the budget.
        """
        cutting = cutting_of(graph, self._split)
        if cutting is None:
            if self._budget is None:
                return graph
            step = SplitStep(graph, self._finished, self._costs, self._asked)
            self.decision = self._decided(step)
            chosen = self.decision.chosen
            cutting, request, self.plan = chosen.cutting, chosen.request, chosen.plan
            self.profile = None if request is None else request.profile
        self.segments = cutting.segments(graph)
        return cutting.cut(graph)

    def _decided(self, step: SplitStep) -> Splitting:
        """The fastest way; where none could be measured it is said why.

        Raises:
            PlanningError: Neither whole nor in parts does it fit the budget.
        """
        try:
            return plan_splitting(step, self._split)
        except PlanningError as e:
            if e.least_bytes is not None or self._unmeasured is None:
                raise
            words = f"{e}, whole or in parts; in the last way that was tried"
            raise PlanningError(f"{words}, {self._unmeasured}") from self._unmeasured

    def _finished(self, graph: Graph) -> Graph:
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

    def _asked(self, graph: Graph, costs: Profile) -> StepRequest:
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
