"""What a backend must provide: a device and a convolution library."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from mucudnn.backends.runner import Call, PlanRunner, per_slice
from mucudnn.ir.conv import ConvPlan, ConvProblem
from mucudnn.ir.numerics import Traits
from mucudnn.ir.tensor import TensorSpec

if TYPE_CHECKING:
    from mucudnn.backends.mapped_memory import Mapper

__all__ = [
    "Array",
    "Backend",
    "Buffer",
    "Capture",
    "ConvLibrary",
    "Copier",
    "Device",
    "Event",
    "Kernel",
    "KernelArguments",
    "PlanTexts",
    "Runner",
    "Ticket",
    "Tier",
]

Array = Any  # numpy.ndarray, cupy.ndarray, torch.Tensor, or nothing at all
Buffer = Any
Event = Any
Ticket = Any  # one copy that was started


class Device(Protocol):
    """Memory and a clock."""

    @property
    def fingerprint(self) -> str:
        """Device and library versions; half of every cache key."""
        ...

    def description(self) -> Mapping[str, str]:
        """What a reader of its figures would ask: versions, driver, clocks.

        The names are free. No key holds any of it: it may change while a program runs.
        """
        ...

    def allocate(self, nbytes: int) -> Buffer:
        """Device memory, freed when the last reference is dropped.

        Raises:
            OutOfMemoryError: The device has no room.
        """
        ...

    def trim(self) -> None:
        """Give back memory that is held for later allocations."""
        ...

    def available_bytes(self) -> int:
        """Memory that is free now, beside what its libraries hold and may yet load.

        Raises:
            UnsupportedError: It has no memory of its own.
        """
        ...

    def view(self, buffer: Buffer, offset: int, spec: TensorSpec) -> Array:
        """A tensor over part of a buffer."""
        ...

    def dense(self, array: Array) -> Array:
        """The array itself if densely packed, else a packed copy."""
        ...

    def randomize(self, array: Array) -> None:
        """Fill with ordinary numbers, to time kernels on."""
        ...

    def upload(self, source: Any, target: Array) -> None:
        """Copy a NumPy array into a tensor of its shape and type.

        The source may be changed as soon as this returns.
        """
        ...

    def download(self, source: Array) -> Any:
        """A tensor as a NumPy array of its own, once all work on it is done."""
        ...

    def queue(self) -> Hashable:
        """The queue that kernels go to now: a thread, or a stream.

        Kernels of one queue run one after another and may share a workspace, which is
        kept as long as the returned object lives.
        """
        ...

    def begin(self, launches: int = 1) -> Event:
        """Mark the start of something to be timed that launches so many kernels.

        Like `record`, but the time that the host needs to launch them is hidden, as it
        is when a training step keeps the device busy.
        """
        ...

    def record(self) -> Event:
        """Mark this point of the compute queue."""
        ...

    def elapsed_ms(self, start: Event, stop: Event) -> float:
        """Time between two marks, waiting for the second."""
        ...

    def host(self, nbytes: int) -> Buffer:
        """Host memory that copies run to and from at full speed.

        Slices of it are buffers too. It is freed when the last reference is dropped.

        Raises:
            OutOfMemoryError: The host has no room.
        """
        ...

    def copier(self) -> "Copier":
        """Two queues of copies beside the compute queue, to be closed after use."""
        ...

    def peer(self, index: int, nbytes: int) -> "Tier":
        """Memory of another device of this kind.

        Raises:
            ValueError: There is no such device, or it is this one.
            OutOfMemoryError: It has no room.
        """
        ...


class Tier(Protocol):
    """Some bytes off the device to copy to."""

    @property
    def name(self) -> str:
        """What it is, for messages."""
        ...

    @property
    def nbytes(self) -> int:
        """How many."""
        ...

    def view(self, offset: int, nbytes: int) -> Buffer:
        """A part of them."""
        ...

    def copier(self, device: Device) -> "Copier":
        """Two queues of copies between it and a device, to be closed after use."""
        ...

    def close(self) -> None:
        """Free them as soon as no view is left; may be called again."""
        ...


class Copier(Protocol):
    """Copies between device and host beside the computations, one queue a direction.

    A copy starts once the work launched so far on the calling thread's compute queue,
    the copies in `after` and those before it in its own queue are done. Source and
    target are of one size in bytes and are kept until it is done.
    """

    def out(
        self, source: Array, target: Buffer, after: Sequence[Ticket] = ()
    ) -> Ticket:
        """Start a copy to the host.

        Raises:
            BackendError: It cannot be started, or an earlier one failed.
        """
        ...

    def back(
        self, source: Buffer, target: Array, after: Sequence[Ticket] = ()
    ) -> Ticket:
        """Start a copy from the host.

        Raises:
            BackendError: It cannot be started, or an earlier one failed.
        """
        ...

    def wait(self, ticket: Ticket) -> None:
        """Make the compute queue wait for a copy; the host only where it must.

        Raises:
            BackendError: A copy is known to have failed.
        """
        ...

    def finish(self) -> None:
        """Wait on the host for all copies. Tickets mean nothing afterwards.

        Raises:
            BackendError: One of them failed; the first.
        """
        ...

    def close(self) -> None:
        """Drop what has not begun and wait for the rest. Nothing is copied afterwards.

        It raises nothing, and may be called again.
        """
        ...


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


def no_workspace(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    attrs: Mapping[str, Any],
) -> int:
    """What a kernel needs that brings its own few tiles: nothing."""
    return 0


Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Makes one launch of all that its argument launches, to be called over and over."""

KernelArguments = tuple[
    Sequence[Array], Sequence[Array], Mapping[str, Any], Buffer | None
]
"""Inputs, outputs, attributes and workspace of one call."""


@dataclass(frozen=True)
class Kernel:
    """One operation of a training step; convolutions have plans instead.

    Attributes:
        run: (inputs, outputs, attributes, workspace) -> nothing. Launches it: writes
            into the outputs, and into inputs that are state. Arrays are dense.
        workspace: (inputs, outputs, attributes) -> bytes that `run` must be given.
        ready: Makes a call without arguments of what `run` is given, for arrays that
            stay where they are and are used over and over; it is called on the
            device's queue (`Device.queue`). None: `run` itself is called.
        together: Makes one such call of several, each as `run` would be given it, that
            follow one another and touch no tensor that another writes, but flags.
            None: they are called one after the other.
        flags: Positions of inputs that are state and that all who write them write
            alike, whatever was there.
    """

    run: Callable[
        [Sequence[Array], Sequence[Array], Mapping[str, Any], Buffer | None], None
    ]
    workspace: Callable[
        [Sequence[TensorSpec], Sequence[TensorSpec], Mapping[str, Any]], int
    ] = no_workspace
    ready: (
        Callable[
            [Sequence[Array], Sequence[Array], Mapping[str, Any], Buffer | None],
            Callable[[], None],
        ]
        | None
    ) = None
    together: Callable[[Sequence["KernelArguments"]], Callable[[], None]] | None = None
    flags: tuple[int, ...] = ()


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
        plan_texts: Writes and reads execution plans, where the library has them.
        mapper: Maps memory under any address, where the device can (`Mapper`).
        kernels: Operation -> kernel, for those that are no convolution.
        capture: Captures launches as a graph, where the device has such.
    """

    name: str
    device: Device
    conv: ConvLibrary
    binder: Callable[[ConvPlan, bool], Runner] | None = None
    index: int = 0
    split_alignment: int = 1
    fragile: bool = False
    plan_texts: PlanTexts | None = None
    mapper: "Mapper | None" = None
    kernels: Mapping[str, Kernel] = field(default_factory=dict, compare=False)
    capture: Capture | None = field(default=None, compare=False)

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
