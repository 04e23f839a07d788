"""A library of convolution algorithms, and plans bound to it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from mucudnn.backends.device import Array, Buffer
from mucudnn.ir.conv import ConvPlan, ConvProblem
from mucudnn.ir.numerics import Traits

__all__ = ["ConvLibrary", "Epilogues", "PlanTexts", "Runner"]


class ConvLibrary(Protocol):
    """The convolution algorithms of one library."""

    def algorithms(self, problem: ConvProblem) -> Sequence[tuple[str, int]]:
        """(name, workspace bytes) of every algorithm that can run `problem`."""
        ...

    def excluded(self, problem: ConvProblem) -> Sequence[tuple[str, str]]:
        """(name, reason) of every algorithm that cannot run `problem`."""
        ...

    def traits(self, problem: ConvProblem, algo: str) -> Traits:
        """How an algorithm that `algorithms` lists computes."""
        ...

    def run(
        self,
        problem: ConvProblem,
        algo: str,
        a: Array,
        b: Array,
        out: Array,
        workspace: Buffer,
        *,
        accumulate: bool = False,
    ) -> None:
        """Launch one kernel. Operands: (x, w) -> y, (dy, w) -> dx, (x, dy) -> dw.

        Arrays have the shapes of `problem.operands()`. `workspace` holds at least the
        bytes that `algorithms` reports; with `accumulate` the result is added to `out`.

        Raises:
            UnsupportedError: The algorithm cannot run the problem.
            BackendError: The library failed, or the workspace is too small.
        """
        ...


class Runner(Protocol):
    """A bound plan: everything is prebuilt that does not depend on the operands."""

    @property
    def plan(self) -> ConvPlan:
        """What it runs."""
        ...

    def run(
        self, a: Array, b: Array, out: Array, workspace: Buffer, accumulate: bool
    ) -> None:
        """Write the result to `out`, or add it with `accumulate`.

        `workspace` holds `plan.workspace` bytes at least.

        Raises:
            StepFailedError: A kernel failed; earlier micro-batches are complete.
        """
        ...


class PlanTexts(Protocol):
    """Execution plans of a library as text, to be remembered between processes."""

    def dumps(
        self, problem: ConvProblem, algo: str, *, accumulate: bool = False
    ) -> str | None:
        """The plan of one algorithm; None for what has none."""
        ...

    def loads(
        self, problem: ConvProblem, algo: str, text: str, *, accumulate: bool = False
    ) -> None:
        """Take a plan that `dumps` wrote, instead of building it.

        Raises:
            BackendError: The library does not take it.
        """
        ...


class Epilogues(Protocol):
    """Forward convolutions that add a bias and apply a ReLU before they write."""

    def offers(self, problem: ConvProblem, bias: str) -> bool:
        """Whether there is a kernel for that, the bias being of this data type."""
        ...

    def bind(
        self, plan: ConvPlan, x: Array, w: Array, bias: Array, y: Array, scratch: Buffer
    ) -> Callable[[], None] | None:
        """A call that computes y, in the micro-batches and the arithmetic of a plan.

        Its kernels are others than the plan's; they need no more than its workspace.
        None where one of the micro-batches has no such kernel.
        """
        ...
