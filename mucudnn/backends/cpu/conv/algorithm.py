"""What an algorithm of the CPU library is: a name and three functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem

__all__ = ["Algorithm", "RunFn"]


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
        Apart from it, less than 64 KiB may be allocated, over all workers.
        """
        ...


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
