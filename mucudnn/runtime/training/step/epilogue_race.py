"""Whether a bias and a ReLU within a convolution are faster than behind it: measured.

The engines that do all three are others than those a convolution was tuned with, and
may be slower by more than a pass over its result takes. So both are timed, once for
each convolution, by the plan that it would have: one call, and its plan's with a kernel
behind. The faster is what is planned; what they took is kept with all measurements.
"""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

from mucudnn.codecs.values import problem_key
from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvPlan, ConvProblem
from mucudnn.ir.graph import Graph, Role
from mucudnn.ir.operations import EPILOGUE, make_node
from mucudnn.ir.tensor import TensorSpec
from mucudnn.runtime.executor.epilogue import ways_to_run
from mucudnn.runtime.profiling.cold_timing import ColdBench
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.step.convolution_plans import Plans
from mucudnn.runtime.training.step.racing import Times, raced_once, timed_within
from mucudnn.runtime.training.step.sizes import WorkingSet
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["EpilogueRace"]

logger = logging.getLogger(__name__)


class EpilogueRace:
    """Times both ways of every convolution that it is asked about, once.

    Args:
        tuner: Plans them; its backend computes, its cache remembers.
        budget: Within which they are measured.
        plans: Made before: what they run by.
        used: What it chooses by, by what was raced; it grows.
    """

    def __init__(
        self,
        tuner: Tuner,
        budget: MemoryBudget | None = None,
        plans: Plans | None = None,
        used: dict[str, Times] | None = None,
    ) -> None:
        self._tuner, self._budget, self._plans = tuner, budget, plans or {}
        self._wins: dict[tuple[ConvProblem, str], bool] = {}
        self._used = {} if used is None else used

    def offers(self, problem: ConvProblem, bias: str) -> bool:
        """Whether there is a kernel for all of it, and it is not the slower way.

        Where there is none for the plan that was timed, nothing speaks against one for
        another plan: what runs until then is what would run anyway.
        """
        epilogues = self._tuner.backend.epilogues
        if epilogues is None or not epilogues.offers(problem, bias):
            return False
        key = problem, bias
        if key not in self._wins:
            plan = self._plan(problem)
            times = None
            if plan is not None:
                measure = partial(self._measured, problem, bias)
                used, raced = self._used, _raced(plan, bias)
                times = raced_once(self._tuner, raced, used, used, measure)
            self._wins[key] = times is None or times[0] <= times[1]
        return self._wins[key]

    def _measured(self, problem: ConvProblem, bias: str) -> Times | None:
        times = self.times(problem, bias)
        if times is not None:
            logger.info(
                "bias and ReLU of %s: %.3g ms within, %.3g ms behind it",
                problem,
                *times,
            )
        return times

    def _plan(self, problem: ConvProblem) -> ConvPlan | None:
        try:
            return self._plans.get(problem) or self._tuner.plan([problem])[0]
        except PlanningError:  # the graph's own planning says more
            return None

    def times(self, problem: ConvProblem, bias: str) -> Times | None:
        """What both ways take; None where only one can be run or be measured.

        Milliseconds in one call, and in two.
        """
        plan = self._plan(problem)
        if plan is None:
            return None
        memory = None if self._budget is None else self._budget.nbytes
        needed, graph = _operands(plan, bias)
        backend = self._tuner.backend

        def both(bench: ColdBench) -> tuple[float, ...]:
            return bench.calls_ms(
                needed,
                lambda a, scratch: ways_to_run(backend, plan, graph, a, scratch),
            )

        otherwise = f"bias and ReLU of {problem} are not timed"
        times = timed_within(backend, needed.pool_bytes, memory, otherwise, both)
        return (times[0], times[1]) if times else None


def _raced(plan: ConvPlan, bias: str) -> dict[str, Any]:
    """What decides both times: the convolution, the type of its bias, and its plan."""
    return {
        "ways": ["within", "behind"],
        "op": EPILOGUE[1],
        "problem": problem_key(plan.problem),
        "batch": plan.problem.batch,
        "bias": bias,
        "steps": [(s.algo, s.batch, s.math_mode, s.workspace) for s in plan.steps],
    }


def _operands(plan: ConvPlan, bias: str) -> tuple[WorkingSet, Graph]:
    """x, w, y and a bias; and the node that adds it to y and applies a ReLU."""
    alone, problem = WorkingSet.of_plan(plan), plan.problem
    x, w, y = alone.operands
    y = replace(y, layout=problem.layout, role=Role.INPUT)
    b = TensorSpec("bias", (problem.w_shape[0],), bias, Role.INPUT)
    made = replace(y, name="made", role=Role.ACTIVATION)
    tensors = {spec.name: spec for spec in (y, b, made)}
    node = make_node(tensors, EPILOGUE[1], EPILOGUE[1], (y.name, b.name), (made.name,))
    return WorkingSet((x, w, y, b), alone.workspace), Graph(tensors, (node,), ())
