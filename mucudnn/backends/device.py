"""A device: memory, a clock, and copies beside its computations."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, Protocol

from mucudnn.ir.tensor import TensorSpec

__all__ = [
    "Array",
    "Buffer",
    "Copier",
    "Device",
    "Event",
    "Start",
    "Ticket",
    "Tier",
    "Way",
]

Array = Any  # numpy.ndarray, cupy.ndarray, torch.Tensor, or nothing at all
Buffer = Any
Event = Any
Ticket = Any  # one copy that was started
Way = Literal["out", "back"]


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

    def dense(self, array: Array, *, copy: bool = False) -> Array:
        """The array itself if densely packed, else (or with `copy`) a packed copy."""
        ...

    def overlap(self, one: Array, other: Array) -> bool:
        """Return whether two densely packed arrays have bytes in common."""
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


class Start(Protocol):
    """Starts a copy, the same every time, once the copies `after` are done."""

    def __call__(self, after: Sequence[Ticket] = ()) -> Ticket:
        """Start it; tickets of earlier starts mean this one from now on.

        Raises:
            BackendError: It cannot be started, or an earlier one failed.
        """
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

    def bound(self, way: Way, source: Any, target: Any) -> Start:
        """What starts a copy that is made over and over, with all made ahead.

        Who holds it keeps source and target until the copy is done.
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
