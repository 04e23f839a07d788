"""Interface of a backend: a device, a convolution library, a table of kernels."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

from mucudnn.backends.device import Array, Buffer, Device, Mapper, StepIO
from mucudnn.backends.plan_runner import Call, PlanRunner, per_slice
from mucudnn.ir.conv import ConvPlan, ConvProblem
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.numerics import Traits
from mucudnn.ir.tensor import TensorSpec


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


class PlanSerializer(Protocol):
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


_Arrays = Sequence[Array]
_Specs = Sequence[TensorSpec]
_Attrs = Mapping[str, Any]
_Call = Callable[[], None]
KernelArguments = tuple[_Arrays, _Arrays, _Attrs, Buffer | None]
"""Inputs, outputs, attributes and workspace of one call."""


@dataclass(frozen=True)
class Kernel:
    """An operation of a training step; convolutions have plans instead.

    Attributes:
        run: (inputs, outputs, attributes, workspace) -> None. Launches the kernel,
            which writes into the outputs, and into inputs that are state. Arrays are
            dense.
        workspace: (inputs, outputs, attributes) -> bytes that `run` must be given.
        prebind: Binds the arguments of `run` for repeated calls on arrays that stay in
            place; called on the device's queue (`Device.queue`). None: `run` is called.
        run_batched: Binds several consecutive calls as one. They write no tensor that
            another of them reads or writes, except flags. None: one after the other.
        flags: Positions of state inputs to which all writers write the same value,
            whatever the previous value.
    """

    run: Callable[[_Arrays, _Arrays, _Attrs, Buffer | None], None]
    workspace: Callable[[_Specs, _Specs, _Attrs], int] = lambda *_: 0
    prebind: Callable[[_Arrays, _Arrays, _Attrs, Buffer | None], _Call] | None = None
    run_batched: Callable[[Sequence[KernelArguments]], _Call] | None = None
    flags: tuple[int, ...] = ()

    def call(
        self, inputs: _Arrays, outputs: _Arrays, attrs: _Attrs, workspace: Buffer | None
    ) -> _Call:
        """Return a call on these arrays, which stay in place; see `prebind`."""
        if self.prebind is not None:
            return self.prebind(inputs, outputs, attrs, workspace)
        return functools.partial(self.run, inputs, outputs, attrs, workspace)


class LibraryKernels(Protocol):
    """Vendor library kernels for operations that the backend has own kernels for.

    A node whose attribute `LIBRARY` is the library's name is computed by it, through
    the backend's kernel table; if the library refuses, the backend's own kernel runs.

    Attributes:
        times_ms: Times of our kernel and the library's in this process, by timed case.
            All steps use the same choice, whatever their caches contain.
    """

    times_ms: dict[str, tuple[float, float]]

    @property
    def name(self) -> str:
        """Name of the library in nodes."""

    def offers(self, graph: Graph, node: Node) -> bool:
        """Return whether the library computes this node and has not refused it."""


Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Record all launches of a function as one launch that can be replayed."""


@dataclass(frozen=True)
class Backend:
    """A device, a convolution library and a table of kernels, passed explicitly.

    Attributes:
        name: Name under which `get_backend` loads the backend.
        device: Memory and clock.
        conv: Library of convolution algorithms.
        binder: Binds a plan faster than one `conv.run` per micro-batch. The flag asks
            to replay the whole plan as one launch. None: use `conv.run`.
        index: Index of the device among those of the backend.
        split_alignment: Bytes to which the operands of a micro-batch must be aligned;
            micro-batch sizes that violate this are no candidates.
        may_crash: Whether a failing kernel may crash the process or its device context,
            so that unknown kernels are better timed in a child process.
        epilogues: Convolutions fused with bias and ReLU, if the library has them.
        plan_serializer: Serializer of execution plans, if the library has them.
        mapper: Maps physical memory at chosen addresses, if the device can (`Mapper`).
        kernels: Operation name to kernel, for all operations but convolutions.
        library_kernels: Kernels of a vendor library for some of the same operations.
        capture: Captures launches as a graph, if the device supports graphs.
        step_io: Makes the object that copies inputs and results while the device
            computes. The flag tells whether inputs may be staged in device memory.
    """

    name: str
    device: Device
    conv: ConvLibrary
    binder: Callable[[ConvPlan, bool], Runner] | None = None
    index: int = 0
    split_alignment: int = 1
    may_crash: bool = False
    epilogues: Epilogues | None = None
    plan_serializer: PlanSerializer | None = None
    mapper: Mapper | None = None
    kernels: Mapping[str, Kernel] = field(default_factory=dict, compare=False)
    library_kernels: LibraryKernels | None = field(default=None, compare=False)
    capture: Capture | None = field(default=None, compare=False)
    step_io: Callable[[bool], StepIO] | None = field(default=None, compare=False)

    def bind(self, plan: ConvPlan, *, replay: bool = False) -> Runner:
        """Bind a plan; with `replay` as a single launch if the backend can."""
        if self.binder is not None:
            return self.binder(plan, replay)

        # Without a binder, every micro-batch is an ordinary call of the library.
        def kernel(problem: ConvProblem, algo: str) -> Call:
            run = self.conv.run
            return lambda a, b, out, workspace, accumulate: run(
                problem, algo, a, b, out, workspace, accumulate=accumulate
            )

        return PlanRunner(plan, per_slice(plan, kernel))

    def __copy__(self) -> "Backend":
        return replace(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Backend cannot be pickled or copied deeply, as it holds a device; "
            f"call get_backend({self.name!r}, {self.index}) in each process"
        )
