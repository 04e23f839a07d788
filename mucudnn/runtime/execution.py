"""Run a plan: micro-batches one after another, filter gradients accumulating."""

from mucudnn.backends.base import Array, Backend, Buffer
from mucudnn.errors import BackendError, MucudnnError
from mucudnn.ir.conv import ConvPlan, Direction

__all__ = ["CompiledPlan", "StepFailedError", "run_plan"]


class StepFailedError(BackendError):
    """A kernel of a plan failed.

    Attributes:
        algo: The algorithm that failed.
        done: Samples whose result had been written before it.
        reason: What the backend said.
    """

    def __init__(self, algo: str, done: int, reason: Exception) -> None:
        super().__init__(f"{algo} failed after {done} samples: {reason}")
        self.algo = algo
        self.done = done
        self.reason = reason


class CompiledPlan:
    """A plan bound to a backend, its sub-problems and slices prebuilt."""

    def __init__(self, backend: Backend, plan: ConvPlan) -> None:
        self.plan = plan
        self.workspace = plan.workspace
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
    CompiledPlan(backend, plan).run(a, b, out, workspace, accumulate)
