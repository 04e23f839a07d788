"""What an algorithm of the CPU library is: a name and three functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem

__all__ = ["Algorithm", "Kernel", "RunFn", "runs_everything"]


class RunFn(Protocol):
    """Run one kernel inside the workspace it is given."""

    def __call__(
        self,
        problem: ConvProblem,
        a: Any,
        b: Any,
        out: Any,
        workspace: Any,
        workers: Workers,
        accumulate: bool,
    ) -> None:
        """Arrays are views in logical axis order, whatever `problem.layout` says.

        (N, C, *spatial) and (K, C // groups, *kernel); with `NHWC` their strides are
        channels-last. `workspace` is 64-byte aligned bytes, exactly as many as asked.
        Apart from it, two workers may allocate less than 64 KiB together, and each
        further one 16 KiB: NumPy's buffers are a thread's own.
        """
        ...


class Kernel(Protocol):
    """One problem planned for some workers: what it needs, and how to run it."""

    @property
    def nbytes(self) -> int:
        """Exact workspace."""
        ...

    def run(
        self,
        a: Any,
        b: Any,
        out: Any,
        workspace: Any,
        workers: Workers,
        accumulate: bool,
    ) -> None:
        """As `RunFn`, without the problem."""
        ...


def runs_everything(problem: ConvProblem) -> str | None:
    """What an algorithm without limitations excludes: nothing."""
    return None


@dataclass(frozen=True)
class Algorithm:
    """One way to compute a convolution.

    Attributes:
        name: cuDNN's name for it.
        excluded: Problem -> why it cannot be run, or None if it can.
        workspace: (problem, number of workers) -> exact bytes needed.
        run: The kernel.
    """

    name: str
    excluded: Callable[[ConvProblem], str | None]
    workspace: Callable[[ConvProblem, int], int]
    run: RunFn

    @classmethod
    def of(
        cls,
        name: str,
        kernel: Callable[[ConvProblem, int], Kernel],
        excluded: Callable[[ConvProblem], str | None] = runs_everything,
    ) -> "Algorithm":
        """An algorithm whose kernels are objects, made from (problem, workers)."""

        def workspace(problem: ConvProblem, workers: int) -> int:
            return kernel(problem, workers).nbytes

        def run(
            problem: ConvProblem,
            a: Any,
            b: Any,
            out: Any,
            workspace: Any,
            workers: Workers,
            accumulate: bool,
        ) -> None:
            planned = kernel(problem, workers.count)
            planned.run(a, b, out, workspace, workers, accumulate)

        return cls(name, excluded, workspace, run)
