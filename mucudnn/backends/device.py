"""Protocols of a device: memory, clock, copies, tiers and mapped memory."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, Protocol

from mucudnn.ir.tensor import TensorSpec

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

    def description(self) -> Mapping[str, str]:
        """Return versions, driver and clocks, for readers of measurements.

        Names are free. No cache key contains any of it: it may change at run time.
        """

    def allocate(self, nbytes: int) -> Buffer:
        """Allocate device memory, freed when the last reference is dropped.

        Raises:
            OutOfMemoryError: The device has no memory for it.
        """

    def trim(self) -> None:
        """Release memory that is cached for later allocations."""

    def available_bytes(self) -> int:
        """Return the free memory, minus a reserve for what its libraries may yet load.

        Raises:
            UnsupportedError: The device has no memory of its own.
        """

    def view(self, buffer: Buffer, offset: int, spec: TensorSpec) -> Array:
        """Return a tensor over part of a buffer."""

    def dense(self, array: Array, *, copy: bool = False) -> Array:
        """Return the array if densely packed, else (or with `copy`) a packed copy."""

    def overlap(self, one: Array, other: Array) -> bool:
        """Return whether two densely packed arrays share bytes."""

    def randomize(self, array: Array) -> None:
        """Fill with ordinary numbers, for timing kernels."""

    def upload(self, source: Any, target: Array) -> None:
        """Copy a NumPy array into a tensor of its shape and type.

        The source may be changed as soon as this returns.
        """

    def download(self, source: Array) -> Any:
        """Wait for all work on a tensor and copy it to a new NumPy array."""

    def queue(self) -> Hashable:
        """Return the queue that kernels go to now: a thread, or a stream.

        Kernels of one queue run one after another and may share a workspace, which is
        kept as long as the returned object lives.
        """

    def begin(self, launches: int = 1) -> Event:
        """Mark the start of timed work that launches so many kernels.

        Like `record`, but hides the host's launch time, as in a training step that
        keeps the device busy.
        """

    def record(self) -> Event:
        """Mark this point of the compute queue."""

    def elapsed_ms(self, start: Event, stop: Event) -> float:
        """Return the time between two marks, waiting for the second."""

    def host(self, nbytes: int) -> Buffer:
        """Allocate host memory for copies at full speed.

        Slices of it are buffers too. It is freed when the last reference is dropped.

        Raises:
            OutOfMemoryError: The host has no memory for it.
        """

    def copier(self) -> "Copier":
        """Return two copy queues beside the compute queue, to be closed after use."""

    def peer(self, index: int, nbytes: int) -> "Tier":
        """Allocate memory of another device of this kind.

        Raises:
            ValueError: There is no such device, or it is this one.
            OutOfMemoryError: It has no memory for it.
        """


class Tier(Protocol):
    """An offload target: memory outside the device."""

    @property
    def name(self) -> str:
        """Name for messages."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    def view(self, offset: int, nbytes: int) -> Buffer:
        """Return a part of the memory."""

    def copier(self, device: Device) -> "Copier":
        """Return two copy queues between this memory and a device, to be closed."""

    def close(self) -> None:
        """Free the memory once no view is left; may be called again."""


class Slab:
    """An offload target of one allocation, to which the device's own copier copies."""

    def __init__(self, name: str, slab: Buffer, nbytes: int) -> None:
        self.name, self.nbytes = name, nbytes
        self._slab = slab

    def view(self, offset: int, nbytes: int) -> Buffer:
        """Return a slice of the slab."""
        return self._slab[offset : offset + nbytes]

    def copier(self, device: Device) -> "Copier":
        """Return the device's own copier."""
        return device.copier()

    def close(self) -> None:
        """Drop the slab."""
        self._slab = None


class Start(Protocol):
    """A function that starts one fixed copy, after the copies `after`."""

    def __call__(self, after: Sequence[Ticket] = ()) -> Ticket:
        """Start the copy; tickets of its earlier starts now refer to this one."""


class Copier(Protocol):
    """Copies between device and host beside the computations, one queue per direction.

    A copy starts once the work launched so far on the calling thread's compute queue,
    the copies in `after` and the earlier ones in its own queue are done. Source and
    target have the same size in bytes. Methods but `close` raise BackendError if a copy
    cannot be started, or an earlier one failed.
    """

    def prebind(self, way: Way, source: Any, target: Any) -> Start:
        """Return a function that starts a copy to the host (`out`) or `back`.

        Everything is prepared, so it may be called again and again. Its caller keeps
        source and target alive until the copy is done.
        """

    def wait(self, ticket: Ticket) -> None:
        """Make the compute queue wait for a copy; the host only where necessary."""

    def finish(self) -> None:
        """Wait on the host for all copies. Tickets are invalid afterwards."""

    def close(self) -> None:
        """Drop copies that have not begun, wait for the rest; may be called again."""


# The interface of devices that can map memory: chunks at any addresses.
#
# A buffer is a range of addresses, each chunk of which is backed by a chunk of memory;
# a chunk may be mapped several times. So fragmented free memory becomes one tensor
# without a copy. Mapping takes time and synchronizes the device: it is done before a
# step runs for the first time, never within one.


class MappedMemory(Protocol):
    """Chunks that were allocated together; freed with the last buffer over them."""

    def map(self, chunks: Sequence[int]) -> Buffer:
        """Map these chunks, in this order, at new contiguous addresses.

        They are unmapped when the last reference to the buffer is dropped. Data written
        at one address can be read at all addresses of the chunk by work that starts
        after the writer is done.

        Raises:
            OutOfMemoryError: There are no addresses left.
            BackendError: The driver failed, or work is being captured.
        """


class Mapper(Protocol):
    """An allocator of memory in chunks."""

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk."""

    def allocate(self, chunks: int) -> MappedMemory:
        """Allocate chunks of physical memory.

        Raises:
            OutOfMemoryError: There is not enough memory.
            UnsupportedError: This system cannot map memory.
        """


def check_chunks(chunks: Sequence[int], count: int) -> None:
    """Raise ValueError if a chunk is not one of `count`."""
    for chunk in chunks:
        if not 0 <= chunk < count:
            raise ValueError(
                f"chunk {chunk} of {count} cannot be mapped; they are counted from 0"
            )


def runs(chunks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (position, first chunk, count) of each run of consecutive chunks."""
    for _, group in groupby(enumerate(chunks), key=lambda pair: pair[1] - pair[0]):
        (at, first), *rest = group
        yield at, first, 1 + len(rest)


class Arriving(Protocol):
    """A tensor that is being copied to the host."""

    def __call__(self) -> Any:
        """Wait for the copy, and return it as a NumPy array.

        Raises:
            BackendError: A kernel before it failed, or the copy.
        """

    @property
    def ready(self) -> bool:
        """True if the copy is complete."""


class StepIO(Protocol):
    """Copies of inputs and results, ordered with kernels; the host does not wait."""

    def upload(self, source: Any, target: Any) -> None:
        """Copy a NumPy array to a tensor, for kernels that are launched later.

        The source may be changed as soon as this returns.
        """

    def download(self, source: Any) -> Arriving:
        """Start to copy a tensor's value after the work launched so far."""

    def close(self) -> None:
        """Wait for copies in progress, and free all buffers."""
