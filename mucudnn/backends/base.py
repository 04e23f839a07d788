"""What a backend must provide: a device, a convolution library, a table of kernels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

from mucudnn.backends.conv_library import ConvLibrary, Epilogues, PlanTexts, Runner
from mucudnn.backends.device import (
    Array,
    Buffer,
    Copier,
    Device,
    Event,
    Ticket,
    Tier,
)
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
"""Makes one launch of all that its argument launches, to be called over and over."""


@dataclass(frozen=True)
class Backend:
    """Parts chosen once, passed explicitly.

    Attributes:
        name: What `get_backend` loads it by.
        device: Memory and a clock.
        conv: Convolution algorithms.
        binder: Binds a plan, where the backend does it better than by calling
            `conv.run` for each micro-batch. The flag asks to replay the whole plan as
            one launch.
        index: Which of the devices of that name.
        split_alignment: Bytes that the operands of a micro-batch must be aligned to;
            sizes that would break it are no candidates.
        fragile: Whether a failing kernel may take the process or its device context
            with it, so that unknown kernels are better timed in a child process.
        epilogues: Does a bias and a ReLU within convolutions, where the library can.
        plan_texts: Writes and reads execution plans, where the library has them.
        mapper: Maps memory under any address, where the device can (`Mapper`).
        kernels: Operation -> kernel, for those that are no convolution.
        library_kernels: Which of them a library computes as well, where there is one.
        capture: Captures launches as a graph, where the device has such.
        transit: Makes what copies inputs and results while the device computes, where
            it does that beside the host; told whether inputs may take memory of the
            device on their way.
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
        """A plan ready to run; with `replay` as one launch, where that can be had."""
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
