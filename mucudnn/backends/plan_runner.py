"""A bound plan as a list of calls, one per micro-batch.

Everything that does not depend on the operands is computed when a plan is bound. If the
library refuses a kernel, the error is raised at its turn, so that the micro-batches
before it are done and the rest can be finished by another algorithm.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mucudnn.errors import MucudnnError, StepFailedError
from mucudnn.ir.conv import ConvPlan, ConvProblem, Direction

Call = Callable[[Any, Any, Any, Any, bool], None]
"""(a, b, out, workspace, accumulate): one kernel, with everything prebuilt."""

Library = Callable[[ConvProblem, str], Call]
"""Makes the call of an algorithm at a micro-batch size; may raise."""


class PlanRunner:
    """The calls of a plan, one per micro-batch on the whole operands; see `Runner`.

    `views` checks the operands of each run, and returns those that the calls take.
    """

    def __init__(
        self,
        plan: ConvPlan,
        calls: Sequence[Call],
        views: Callable[[Any, Any, Any], tuple[Any, Any, Any]] | None = None,
    ) -> None:
        self.plan = plan
        self._calls, self._views = tuple(calls), views

    def run(self, a: Any, b: Any, out: Any, workspace: Any, accumulate: bool) -> None:
        """See `Runner.run`."""
        done = 0
        if self._views is not None:
            a, b, out = self._views(a, b, out)
        try:
            for call in self._calls:
                call(a, b, out, workspace, accumulate)
                done += 1
        except (MucudnnError, MemoryError) as e:
            steps = self.plan.steps
            samples = sum(step.batch for step in steps[:done])
            raise StepFailedError(steps[done].algo, samples, e) from e


def per_step(plan: ConvPlan, library: Library) -> list[Call]:
    """Return the kernel of each micro-batch; equal ones are made once."""
    made: dict[tuple[int, str], Call] = {}
    for step in plan.steps:
        key = step.batch, step.algo
        if key not in made:
            try:
                made[key] = library(plan.problem.with_batch(step.batch), step.algo)
            except (MucudnnError, MemoryError) as e:
                # Raise at this kernel's turn: the micro-batches before it are of use.
                made[key] = partial(_refuse, e)
    return [made[step.batch, step.algo] for step in plan.steps]


def per_slice(plan: ConvPlan, library: Library) -> list[Call]:
    """Return the kernel of each micro-batch, on its slice of the whole batch.

    Forward and backward data write disjoint slices. A filter gradient is summed over
    micro-batches: the first obeys `accumulate`, the later ones always add.
    """
    calls = per_step(plan, library)
    if not plan.divided:
        return calls
    sums = plan.problem.direction is Direction.BACKWARD_FILTER
    pairs = zip(calls, plan.slices(), strict=True)
    return [_on_slice(call, window, sums) for call, (window, _) in pairs]


def _on_slice(kernel: Call, window: slice, sums: bool) -> Call:
    """Return a call on the whole operands of a kernel that takes a slice of them."""
    later = window.start > 0

    def write(a: Any, b: Any, out: Any, workspace: Any, accumulate: bool) -> None:
        kernel(a[window], b, out[window], workspace, accumulate)

    def add(a: Any, b: Any, out: Any, workspace: Any, accumulate: bool) -> None:
        kernel(a[window], b[window], out, workspace, accumulate or later)

    return add if sums else write


def _refuse(error: Exception, *operands: Any) -> None:
    raise error
