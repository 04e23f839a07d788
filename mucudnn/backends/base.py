"""What a backend must provide: a device and a convolution library."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mucudnn.ir.conv import ConvProblem
from mucudnn.ir.tensor import TensorSpec

__all__ = ["Array", "Backend", "Buffer", "ConvLibrary", "Device", "Event"]

Array = Any  # numpy.ndarray, cupy.ndarray, torch.Tensor, or nothing at all
Buffer = Any
Event = Any


class Device(Protocol):
    """Memory and a clock."""

    @property
    def fingerprint(self) -> str:
        """Device and library versions; half of every cache key."""
        ...

    def allocate(self, nbytes: int) -> Buffer:
        """Device memory, freed when the last reference is dropped.

        Raises:
            OutOfMemoryError: The device has no room.
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

    def record(self) -> Event:
        """Mark this point of the compute queue."""
        ...

    def elapsed_ms(self, start: Event, stop: Event) -> float:
        """Time between two marks, waiting for the second."""
        ...


class ConvLibrary(Protocol):
    """The convolution algorithms of one library."""

    def algorithms(self, problem: ConvProblem) -> Sequence[tuple[str, int]]:
        """(name, workspace bytes) of every algorithm that can run `problem`."""
        ...

    def excluded(self, problem: ConvProblem) -> Sequence[tuple[str, str]]:
        """(name, reason) of every algorithm that cannot run `problem`."""
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


@dataclass(frozen=True)
class Backend:
    """Two parts, chosen once, passed explicitly."""

    name: str
    device: Device
    conv: ConvLibrary
