"""Run a plan: micro-batches one after another, filter gradients accumulating."""

from mucudnn.backends.base import Array, Backend, Buffer, PlanRunner
from mucudnn.errors import MucudnnError, StepFailedError
from mucudnn.ir.conv import ConvPlan, Direction

__all__ = ["CompiledPlan", "StepFailedError", "compile_plan", "run_plan"]


class CompiledPlan:
    """A plan bound to a backend, its sub-problems and slices prebuilt."""

    def __init__(self, backend: Backend, plan: ConvPlan) -> None:
        self.plan = plan
        self._conv = backend.conv
        self._to_filter = plan.problem.direction is Direction.BACKWARD_FILTER
        self._steps = tuple(
            (window, plan.problem.with_batch(step.batch), step.algo)
            for window, step in plan.slices()
        )

    def run(
        self, a: Array, b: Array, out: Array, workspace: Buffer, accumulate: bool
    ) -> None:
        """Write the result to `out`, or add it with `accumulate`.

        Forward and backward data write disjoint slices. A filter gradient adds up over
        micro-batches: the first obeys `accumulate`, those after it always add.

        Raises:
            StepFailedError: A kernel failed; earlier micro-batches are complete.
        """
        run = self._conv.run
        whole = len(self._steps) == 1
        for window, problem, algo in self._steps:
            try:
                if whole:
                    run(problem, algo, a, b, out, workspace, accumulate=accumulate)
                elif self._to_filter:
                    add = accumulate or window.start > 0
                    x, dy = a[window], b[window]
                    run(problem, algo, x, dy, out, workspace, accumulate=add)
                else:
                    src, dst = a[window], out[window]
                    run(problem, algo, src, b, dst, workspace, accumulate=accumulate)
            except (MucudnnError, MemoryError) as e:
                raise StepFailedError(algo, window.start, e) from e


def compile_plan(
    backend: Backend, plan: ConvPlan, *, replay: bool = False
) -> PlanRunner:
    """The backend's own runner of a plan, or one call of its library a micro-batch.

    With `replay` a backend that can launches the whole plan at once.
    """
    if backend.compile is not None:
        return backend.compile(plan, replay)
    return CompiledPlan(backend, plan)


def run_plan(
    backend: Backend,
    plan: ConvPlan,
    a: Array,
    b: Array,
    out: Array,
    workspace: Buffer,
    *,
    accumulate: bool = False,
) -> None:
    """Run the micro-batches of a plan once.

    Operands are those of `ConvLibrary.run` for the whole mini-batch; `workspace` holds
    at least `plan.workspace` bytes.

    Raises:
        StepFailedError: A kernel failed.
    """
    compile_plan(backend, plan).run(a, b, out, workspace, accumulate)
