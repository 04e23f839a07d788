"""A plan bound to cuDNN: one prebuilt call per micro-batch, reused for known addresses.

For operands at known addresses, running is a dictionary lookup and one C call per
micro-batch: no allocation, no descriptor, no synchronisation. Such a run can be
captured; with `replay` the whole plan is captured once and launched as one graph.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mucudnn.backends.base import Capture
from mucudnn.backends.cuda.conv import CudaConv, operands_of
from mucudnn.backends.cuda.conv.launch import Launch, Operands
from mucudnn.errors import MucudnnError, StepFailedError
from mucudnn.ir.conv import AlgoPerf, ConvPlan, Direction

__all__ = ["CudaPlan", "step_operands"]

logger = logging.getLogger(__name__)

_KNOWN = 64  # sets of addresses in the cache; at this number all are dropped


@dataclass(slots=True)
class _Bound:
    steps: Sequence[tuple[AlgoPerf, int, Sequence[Launch]]]
    calls: Sequence[tuple[Callable[..., int], tuple[Any, ...]]]
    graph: Callable[[], None] | None = None

    def at(self, position: int) -> tuple[AlgoPerf, int, Launch]:
        return [
            (step, start, launch)
            for step, start, launches in self.steps
            for launch in launches
        ][position]


class CudaPlan:
    """A bound plan, replayed as a CUDA graph by `capture` if given; see `Runner`."""

    def __init__(
        self, conv: CudaConv, plan: ConvPlan, capture: Capture | None = None
    ) -> None:
        self._conv = conv
        self.plan = plan
        self._capture = capture
        self._known: dict[tuple[int, int, int, int, bool], _Bound] = {}
        micro = {n: plan.problem.with_batch(n) for n in {s.batch for s in plan.steps}}
        self._parts = [
            (step, window.start, micro[step.batch]) for window, step in plan.slices()
        ]

    def run(self, a: Any, b: Any, out: Any, workspace: Any, accumulate: bool) -> None:
        """See `Runner.run`."""
        scratch = 0 if workspace is None else workspace.data.ptr
        key = (a.data.ptr, b.data.ptr, out.data.ptr, scratch, accumulate)
        bound = self._known.get(key)
        if bound is None:
            bound = self._bind(operands_of(a, b, out, workspace), accumulate)
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[key] = bound
        elif self._capture is not None:
            self._replay(bound, self._capture)
            return
        self._launch(bound)

    def _bind(self, operands: Operands, accumulate: bool) -> _Bound:
        steps = []
        sums = self.plan.problem.direction is Direction.BACKWARD_FILTER
        for step, start, micro in self._parts:
            try:
                launches = self._conv.launches(
                    micro,
                    step.algo,
                    step_operands(self.plan, start, operands),
                    first=start == 0 or not sums,
                    accumulate=accumulate,
                )
            except MucudnnError as e:
                raise StepFailedError(step.algo, 0, e) from e
            steps.append((step, start, launches))
        calls = [(c.function, c.arguments) for _, _, cs in steps for c in cs]
        return _Bound(steps, calls)

    def _launch(self, bound: _Bound) -> None:
        position, session = 0, self._conv.session
        try:
            handle = session.handle()
            for position, (function, arguments) in enumerate(bound.calls):
                status = function(handle, *arguments)
                if status:
                    session.calls.raise_for(bound.at(position)[2].name, status)
        except MucudnnError as e:
            step, start, _ = bound.at(position)
            raise StepFailedError(step.algo, start, e) from e

    def _replay(self, bound: _Bound, capture: Capture) -> None:
        """Launch the graph, captured on the second run, when all kernels are loaded.

        Nothing runs during a capture, so a call that cannot be captured leaves no
        partial result; such a plan continues call by call.
        """
        if bound.graph is None:
            try:
                bound.graph = capture(lambda: self._launch(bound))
            except MucudnnError as e:
                logger.warning("the plan is not replayed: %s", e)
                bound.graph = lambda: self._launch(bound)
        bound.graph()


def step_operands(plan: ConvPlan, start: int, operands: Operands) -> Operands:
    """Return the addresses of the micro-batch that begins at sample `start`."""
    problem = plan.problem
    x, y = (
        start * problem.itemsize * math.prod(shape[1:])
        for shape in (problem.x_shape, problem.y_shape)
    )
    match problem.direction:
        case Direction.FORWARD:
            a, b, out = x, 0, y
        case Direction.BACKWARD_DATA:
            a, b, out = y, 0, x
        case Direction.BACKWARD_FILTER:
            a, b, out = x, y, 0
    return replace(operands, a=operands.a + a, b=operands.b + b, out=operands.out + out)
