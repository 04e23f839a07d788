"""A dynamic pool: tensors in one arena, for what no schedule has placed.

Steps that are planned have static offsets; what comes and goes unforeseen gets its
bytes here. The arena is allocated once, exactly as large as was asked, and never grows:
a pool cannot exceed its budget. When it is short the error names the tensors alive.
"""

from mucudnn.backends.base import Array, Buffer, Device
from mucudnn.ir.tensor import TensorSpec
from mucudnn.runtime.executor.best_fit import BestFit, PoolStatistics

__all__ = ["Pool", "PoolStatistics"]


class Pool:
    """One arena of a device, and the tensors in it.

    Not shared by threads. What is in a block at the start is undefined.

    Args:
        device: Where the arena is allocated, once.
        nbytes: Its size, which nothing exceeds.
        name: What it is, for messages.

    Raises:
        OutOfMemoryError: The device has no room for the arena.
        ValueError: The size is negative.
    """

    def __init__(self, device: Device, nbytes: int, name: str = "the pool") -> None:
        self._device = device
        self._name = name
        self._blocks = BestFit(nbytes, name)
        self._arena: Buffer | None = device.allocate(nbytes)

    @property
    def nbytes(self) -> int:
        """Size of the arena."""
        return self._blocks.nbytes

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest block that could be had now."""
        return self._blocks.largest_hole

    @property
    def statistics(self) -> PoolStatistics:
        """How full it is, and was."""
        return self._blocks.statistics

    def __contains__(self, name: str) -> bool:
        return name in self._blocks

    def fits(self, nbytes: int) -> bool:
        """Whether a block of so many bytes could be had now."""
        return self._blocks.fits(nbytes)

    def allocate(self, name: str, nbytes: int) -> None:
        """Reserve bytes under a name.

        Raises:
            OutOfMemoryError: No hole is large enough; says what is alive, and what
                would make room.
            ValueError: The name has a block already, or the pool is closed.
        """
        self._opened()
        self._blocks.allocate(name, nbytes)

    def free(self, name: str) -> None:
        """Give the bytes of a name back.

        Raises:
            ValueError: It has none.
        """
        self._blocks.free(name)

    def view(self, name: str, spec: TensorSpec) -> Array:
        """A tensor at the start of a name's bytes; it means something until `free`.

        Raises:
            ValueError: The name has no bytes, or fewer than the tensor.
        """
        held = self._blocks.size(name)
        if spec.nbytes > held:
            raise ValueError(
                f"{spec.dtype} {spec.shape} has {spec.nbytes} bytes, {name!r} has "
                f"{held} of {self._name}"
            )
        return self._device.view(self._opened(), self._blocks.offset(name), spec)

    def buffer(self, name: str) -> Buffer:
        """The bytes of a name.

        Raises:
            ValueError: It has none.
        """
        spec = TensorSpec("bytes", (self._blocks.size(name),), "uint8")
        return self.view(name, spec)

    def close(self) -> None:
        """Free everything, the arena once no view is left; may be called again."""
        self._blocks.clear()
        self._arena = None
        self._device.trim()

    def _opened(self) -> Buffer:
        if self._arena is None:
            raise ValueError(f"{self._name} was closed; make another")
        return self._arena
