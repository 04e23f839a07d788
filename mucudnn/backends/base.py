"""The interface of a backend: a device, a convolution library, a table of kernels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

from mucudnn.backends.conv_library import ConvLibrary, Epilogues, PlanTexts, Runner
from mucudnn.backends.device import Array, Buffer, Copier, Device, Event, Ticket, Tier
from mucudnn.backends.kernel import Kernel, KernelArguments, LibraryKernels
from mucudnn.backends.mapped_memory import Mapper
from mucudnn.backends.runner import Call, PlanRunner, per_slice
from mucudnn.backends.transit import Transit
from mucudnn.ir.conv import ConvPlan, ConvProblem

__all__ = [
    "Array",
    "Backend",
    "Buffer",
    "Capture",
    "ConvLibrary",
    "Copier",
    "Device",
    "Epilogues",
    "Event",
    "Kernel",
    "KernelArguments",
    "LibraryKernels",
    "PlanTexts",
    "Runner",
    "Ticket",
    "Tier",
]

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
        fragile: Whether a failing kernel may crash the process or its device context,
            so that unknown kernels are better timed in a child process.
        epilogues: Convolutions fused with bias and ReLU, if the library has them.
        plan_texts: Serializer of execution plans, if the library has them.
        mapper: Maps physical memory at chosen addresses, if the device can (`Mapper`).
        kernels: Operation name to kernel, for all operations but convolutions.
        library_kernels: Kernels of a vendor library for some of the same operations.
        capture: Captures launches as a graph, if the device supports graphs.
        transit: Makes the object that copies inputs and results while the device
            computes. The flag tells whether inputs may be staged in device memory.
    """

    name: str
    device: Device
    conv: ConvLibrary
    binder: Callable[[ConvPlan, bool], Runner] | None = None
    index: int = 0
    split_alignment: int = 1
    fragile: bool = False
    epilogues: Epilogues | None = None
    plan_texts: PlanTexts | None = None
    mapper: Mapper | None = None
    kernels: Mapping[str, Kernel] = field(default_factory=dict, compare=False)
    library_kernels: LibraryKernels | None = field(default=None, compare=False)
    capture: Capture | None = field(default=None, compare=False)
    transit: Callable[[bool], Transit] | None = field(default=None, compare=False)

    def bind(self, plan: ConvPlan, *, replay: bool = False) -> Runner:
        """Bind a plan; with `replay` as a single launch if the backend can."""
        if self.binder is not None:
            return self.binder(plan, replay)

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
            "a Backend can be neither pickled nor copied deeply, as it holds a device; "
            f"get_backend({self.name!r}, {self.index}) makes it anew, in any process"
        )
