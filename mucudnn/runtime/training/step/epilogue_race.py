"""Measure whether bias and ReLU are faster fused into a convolution or after it.

The engines that fuse all three differ from those that the tuner measured, and may lose
more than the separate pass over the result costs. So both ways are timed once per
convolution, with the plan that it would have. The faster is used, and the times are
cached with all measurements.
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
    """Times convolutions with fused and with separate bias and ReLU, once each.

    `plans` are existing convolution plans. The times by which choices were made are
    added to `used`.
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
        """Return whether a fused kernel exists and is not slower.

        If there is no fused kernel for the timed plan, there may be one for another
        plan, so the answer is yes; without one, separate kernels run anyway.
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
        except PlanningError:  # planning the graph reports it in more detail
            return None

    def times(self, problem: ConvProblem, bias: str) -> Times | None:
        """Return the times in one call and in two, in ms.

        None where only one of them can be run or measured.
        """
        plan = self._plan(problem)
        if plan is None:
            return None
        memory = None if self._budget is None else self._budget.nbytes
        needed, graph = _operands(plan, bias)
        backend = self._tuner.backend

        def both(bench: ColdBench) -> tuple[float, ...]:
            return bench.calls_ms(
                needed, lambda a, scratch: ways_to_run(backend, plan, graph, a, scratch)
            )

        otherwise = f"bias and ReLU of {problem} are not timed"
        times = timed_within(backend, needed.pool_bytes, memory, otherwise, both)
        return (times[0], times[1]) if times else None


def _raced(plan: ConvPlan, bias: str) -> dict[str, Any]:
    """Return everything that determines both times, as the key of the race."""
    return {
        "ways": ["within", "behind"],
        "op": EPILOGUE[1],
        "problem": problem_key(plan.problem),
        "batch": plan.problem.batch,
        "bias": bias,
        "steps": [(s.algo, s.batch, s.math_mode, s.workspace) for s in plan.steps],
    }


def _operands(plan: ConvPlan, bias: str) -> tuple[WorkingSet, Graph]:
    """Return x, w, y and bias, and a graph of the separate bias-and-ReLU node."""
    alone, problem = WorkingSet.of_plan(plan), plan.problem
    x, w, y = alone.operands
    y = replace(y, layout=problem.layout, role=Role.INPUT)
    b = TensorSpec("bias", (problem.w_shape[0],), bias, Role.INPUT)
    made = replace(y, name="made", role=Role.ACTIVATION)
    tensors = {spec.name: spec for spec in (y, b, made)}
    node = make_node(tensors, EPILOGUE[1], EPILOGUE[1], (y.name, b.name), (made.name,))
    return WorkingSet((x, w, y, b), alone.workspace), Graph(tensors, (node,), ())
