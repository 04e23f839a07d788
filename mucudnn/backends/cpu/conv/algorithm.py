"""The interface of a CPU algorithm: a name and two functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem

__all__ = ["Algorithm", "Kernel", "runs_everything"]


class Kernel(Protocol):
    """A problem planned for a number of workers.

    It holds sizes and strides but no arrays, so threads can share it.
    """

    @property
    def nbytes(self) -> int:
        """Exact workspace in bytes."""

    def run(
        self,
        a: Any,
        b: Any,
        out: Any,
        workspace: Any,
        workers: Workers,
        accumulate: bool,
    ) -> None:
        """Run inside the workspace with as many workers as planned.

        Arrays are views in logical axis order, whatever `problem.layout` says:
        (N, C, *spatial) and (K, C // groups, *kernel); with `NHWC` their strides are
        channels-last. `workspace` is 64-byte aligned and has exactly `nbytes` bytes.
        Beyond it, two workers together may allocate less than 64 KiB, and each
        further one 16 KiB, for NumPy's per-thread buffers.
        """


def runs_everything(problem: ConvProblem) -> str | None:
    """Return no reason: exclude nothing."""
    return None


@dataclass(frozen=True)
class Algorithm:
    """A way to compute a convolution.

    Attributes:
        name: cuDNN's name of the algorithm.
        kernel: (problem, number of workers) -> planned kernel.
        excluded: Problem -> reason why it cannot be run; None if it can.
        notes: Further notes for `Traits`.
    """

    name: str
    kernel: Callable[[ConvProblem, int], Kernel]
    excluded: Callable[[ConvProblem], str | None] = runs_everything
    notes: tuple[str, ...] = ()
