"""The interface of a convolution library and of the plans bound to it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from mucudnn.backends.device import Array, Buffer
from mucudnn.ir.conv import ConvPlan, ConvProblem
from mucudnn.ir.numerics import Traits

__all__ = ["ConvLibrary", "Epilogues", "PlanTexts", "Runner"]


class ConvLibrary(Protocol):
    """The convolution algorithms of one library."""

    def algorithms(self, problem: ConvProblem) -> Sequence[tuple[str, int]]:
        """Return (name, workspace bytes) of every algorithm that can run `problem`."""

    def excluded(self, problem: ConvProblem) -> Sequence[tuple[str, str]]:
        """Return (name, reason) of every algorithm that cannot run `problem`."""

    def traits(self, problem: ConvProblem, algo: str) -> Traits:
        """Return the numerical traits of a listed algorithm."""

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


class Runner(Protocol):
    """A bound plan: everything that does not depend on the operands is prebuilt."""

    @property
    def plan(self) -> ConvPlan:
        """The plan that is run."""

    def run(
        self, a: Array, b: Array, out: Array, workspace: Buffer, accumulate: bool
    ) -> None:
        """Write the result to `out`, or add it with `accumulate`.

        `workspace` holds at least `plan.workspace` bytes.

        Raises:
            StepFailedError: A kernel failed; earlier micro-batches are complete.
        """


class PlanTexts(Protocol):
    """A serializer of execution plans, which lets processes reuse them."""

    def dumps(
        self, problem: ConvProblem, algo: str, *, accumulate: bool = False
    ) -> str | None:
        """Return the plan of an algorithm as text; None if it has no plan."""

    def loads(
        self, problem: ConvProblem, algo: str, text: str, *, accumulate: bool = False
    ) -> None:
        """Load a plan that `dumps` wrote, instead of building it.

        Raises:
            BackendError: The library rejects the text.
        """


class Epilogues(Protocol):
    """Forward convolutions that add a bias and apply a ReLU before they write."""

    def offers(self, problem: ConvProblem, bias: str) -> bool:
        """Return whether a kernel exists for a bias of this data type."""

    def bind(
        self, plan: ConvPlan, x: Array, w: Array, bias: Array, y: Array, scratch: Buffer
    ) -> Callable[[], None] | None:
        """Return a call that computes y in the micro-batches and arithmetic of a plan.

        The fused kernels are not those of the plan; they need at most its workspace.
        Return None if a micro-batch has no such kernel.
        """
