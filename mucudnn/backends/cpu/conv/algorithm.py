"""What an algorithm of the CPU library is: a name and two functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem

__all__ = ["Algorithm", "Kernel", "runs_everything"]


class Kernel(Protocol):
    """One problem planned for some workers: what it needs, and how to run it.

    It holds sizes and strides and no arrays, so that threads can share it.
    """

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
        """Run inside the workspace; `workers` are as many as it was planned for.

        Arrays are views in logical axis order, whatever `problem.layout` says:
        (N, C, *spatial) and (K, C // groups, *kernel); with `NHWC` their strides are
        channels-last. `workspace` is 64-byte aligned bytes, exactly as many as asked.
        Apart from it, two workers may allocate less than 64 KiB together, and each
        further one 16 KiB: NumPy's buffers are a thread's own.
        """
        ...


def runs_everything(problem: ConvProblem) -> str | None:
    """What an algorithm without limitations excludes: nothing."""
    return None


@dataclass(frozen=True)
class Algorithm:
    """One way to compute a convolution.

    Attributes:
        name: cuDNN's name for it, of those that it has.
        kernel: (problem, number of workers) -> what runs it.
        excluded: Problem -> why it cannot be run, or None if it can.
        notes: What else is known of it, as `Traits` say it.
    """

    name: str
    kernel: Callable[[ConvProblem, int], Kernel]
    excluded: Callable[[ConvProblem], str | None] = runs_everything
    notes: tuple[str, ...] = ()
