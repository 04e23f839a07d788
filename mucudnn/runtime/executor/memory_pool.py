"""A dynamic pool: tensors in one arena, for what no schedule has placed.

Steps that are planned have static offsets; what comes and goes unforeseen gets its
bytes here. The arena is allocated once, exactly as large as was asked, and never grows:
a pool cannot exceed its budget.

A block takes the smallest hole that holds it and merges with the holes on both sides
when it is freed, so that what is empty is one hole again. A request that finds no room
is answered with the names of what is alive.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mucudnn.backends.base import Array, Buffer, Device
from mucudnn.errors import OutOfMemoryError
from mucudnn.ir.sizes import format_bytes
from mucudnn.ir.tensor import TensorSpec
from mucudnn.passes.liveness import rounded

__all__ = ["BestFit", "Pool", "PoolStatistics", "largest_first"]

_NAMED = 8


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """How full a pool is, and was.

    Attributes:
        nbytes: Of the whole arena.
        reserved_bytes: In blocks, each rounded up.
        used_bytes: Of these, what was asked for.
        peak_bytes: The most that were ever reserved at once.
        largest_hole: The largest block that it could give now, in bytes.
        holes: How many pieces the free bytes are in.
        blocks: How many are alive.
        allocations: How many were ever given.
        failures: How many requests were refused.
    """

    nbytes: int
    reserved_bytes: int
    used_bytes: int
    peak_bytes: int
    largest_hole: int
    holes: int
    blocks: int
    allocations: int
    failures: int

    @property
    def free_bytes(self) -> int:
        """Bytes in no block."""
        return self.nbytes - self.reserved_bytes

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes that the largest hole does not have."""
        return 1 - self.largest_hole / self.free_bytes if self.free_bytes else 0.0


@dataclass(frozen=True, slots=True)
class _Allocation:
    """Bytes of a name: where, how many were asked for, and how many it occupies."""

    offset: int
    nbytes: int
    reserved: int


class BestFit:
    """Offsets for named blocks in a range of bytes; it has no memory itself.

    Offsets are multiples of an arena's alignment; where the length is none, the block
    at the end may take what is left.

    Args:
        nbytes: Length of the range; a `ValueError` if negative.
        where: What the bytes are of, for messages.
    """

    def __init__(self, nbytes: int, where: str = "the pool") -> None:
        if nbytes < 0:
            raise ValueError(f"a pool cannot have {nbytes} bytes; 0 is the least")
        self.nbytes = nbytes
        self._where = where
        self._peak = self._given = self._failures = 0
        self._blocks: dict[str, _Allocation] = {}
        self._holes: dict[int, int] = {}  # offset -> bytes
        self.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._blocks

    def __iter__(self) -> Iterator[str]:
        """Names of the blocks alive, the oldest first."""
        return iter(self._blocks)

    def offset(self, name: str) -> int:
        """Where a block begins; a `ValueError` if there is none of that name."""
        return self._block(name).offset

    def size(self, name: str) -> int:
        """Bytes that were asked for; a `ValueError` if there is no such block."""
        return self._block(name).nbytes

    def fits(self, nbytes: int) -> bool:
        """Whether a block of so many bytes could be had now."""
        return nbytes <= self.largest_hole

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest block that could be had now."""
        return max(self._holes.values(), default=0)

    def allocate(self, name: str, nbytes: int) -> int:
        """The offset of bytes in the smallest hole that has them, the first of equals.

        Raises:
            OutOfMemoryError: No hole is large enough; says what is alive, and what
                would make room.
            ValueError: The name has a block already, or the size is negative.
        """
        if name in self._blocks:
            raise ValueError(
                f"{name!r} already has {format_bytes(self.size(name))} of "
                f"{self._where}; free it first"
            )
        if nbytes < 0:
            raise ValueError(f"{name!r} cannot have {nbytes} bytes; 0 is the least")
        if not self.fits(nbytes):
            self._failures += 1
            raise OutOfMemoryError(self._shortage(name, nbytes))
        self._blocks[name] = block = self._cut(nbytes)
        self._peak = max(self._peak, self._reserved_bytes)
        self._given += 1
        return block.offset

    def free(self, name: str) -> None:
        """Give a block back; a `ValueError` if there is none of that name."""
        block = self._block(name)
        del self._blocks[name]
        if block.reserved:
            start, nbytes = self._hole_without(block)
            self._holes.pop(block.offset + block.reserved, None)
            self._holes[start] = nbytes

    def clear(self) -> None:
        """Give all blocks back."""
        self._blocks.clear()
        self._holes = {0: self.nbytes} if self.nbytes else {}

    @property
    def statistics(self) -> PoolStatistics:
        """How full it is, and was."""
        blocks = self._blocks.values()
        return PoolStatistics(
            nbytes=self.nbytes,
            reserved_bytes=self._reserved_bytes,
            used_bytes=sum(block.nbytes for block in blocks),
            peak_bytes=self._peak,
            largest_hole=self.largest_hole,
            holes=len(self._holes),
            blocks=len(blocks),
            allocations=self._given,
            failures=self._failures,
        )

    @property
    def _reserved_bytes(self) -> int:
        return sum(block.reserved for block in self._blocks.values())

    def _block(self, name: str) -> _Allocation:
        if name not in self._blocks:
            raise ValueError(f"{name!r} has no bytes of {self._where}; {self._alive()}")
        return self._blocks[name]

    def _cut(self, nbytes: int) -> _Allocation:
        """A block from the front of the best hole, which is large enough."""
        if nbytes == 0:
            return _Allocation(0, 0, 0)
        size, offset = min((n, at) for at, n in self._holes.items() if n >= nbytes)
        reserved = min(rounded(nbytes), size)
        del self._holes[offset]
        if size > reserved:
            self._holes[offset + reserved] = size - reserved
        return _Allocation(offset, nbytes, reserved)

    def _hole_without(self, block: _Allocation) -> tuple[int, int]:
        """The hole that freeing a block would leave: its first byte and its size."""
        below = (at for at, n in self._holes.items() if at + n == block.offset)
        start = next(below, block.offset)
        end = block.offset + block.reserved
        return start, end + self._holes.get(end, 0) - start

    def _shortage(self, name: str, nbytes: int) -> str:
        """Why there is no room, and for what there would be."""
        now = self.statistics
        sizes = nbytes, self.nbytes, now.free_bytes, now.largest_hole
        needed, whole, free, hole = (format_bytes(size, *sizes) for size in sizes)
        return (
            f"no room for {name!r} of {needed} in {self._where} of {whole}: {free} are "
            f"free, the largest hole is {hole}; {self._alive()}; {self._remedy(nbytes)}"
        )

    def _alive(self) -> str:
        if not self._blocks:
            return "nothing is alive"
        sizes = {name: block.nbytes for name, block in self._blocks.items()}
        return f"alive are {largest_first(sizes)}"

    def _remedy(self, nbytes: int) -> str:
        wanted = self._reserved_bytes + rounded(nbytes)
        larger = f"a pool of {wanted} bytes would do"
        if wanted <= self.nbytes:
            larger = f"its {len(self._holes)} holes would do if they were one"
        enough = [
            (block.nbytes, name)
            for name, block in self._blocks.items()
            if block.reserved and self._hole_without(block)[1] >= nbytes
        ]
        return (
            f"freeing {min(enough)[1]!r} would make room, {larger}"
            if enough
            else larger
        )


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
        self.nbytes = nbytes
        self._device = device
        self._name = name
        self._blocks = BestFit(nbytes, name)
        self._arena: Buffer | None = device.allocate(nbytes)

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest block that could be had now."""
        return self._blocks.largest_hole

    @property
    def statistics(self) -> PoolStatistics:
        """How full the pool is, and was."""
        return self._blocks.statistics

    def fits(self, nbytes: int) -> bool:
        """Whether a block of so many bytes could be had now."""
        return self._blocks.fits(nbytes)

    def allocate(self, name: str, nbytes: int) -> None:
        """As `BestFit.allocate`; a `ValueError`, too, if the pool is closed."""
        self._opened()
        self._blocks.allocate(name, nbytes)

    def free(self, name: str) -> None:
        """Give the bytes of a name back; a `ValueError` if it has none."""
        self._blocks.free(name)

    def view(self, name: str, spec: TensorSpec) -> Array:
        """A tensor at the start of a name's bytes; it means something until `free`.

        A `ValueError` if the name has no bytes, or fewer than the tensor.
        """
        held = self._blocks.size(name)
        if spec.nbytes > held:
            raise ValueError(
                f"{spec.dtype} {spec.shape} has {spec.nbytes} bytes, {name!r} has "
                f"{held} of {self._name}"
            )
        return self._device.view(self._opened(), self._blocks.offset(name), spec)

    def buffer(self, name: str) -> Buffer:
        """The bytes of a name; a `ValueError` if it has none."""
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


def largest_first(sizes: Mapping[str, int]) -> str:
    """`'x' (12.0 MiB), 'w' (1.0 MiB) and 3 more, 4.0 KiB`: names with their bytes."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name!r} ({format_bytes(n)})" for name, n in ordered[:_NAMED])
    if rest := [nbytes for _, nbytes in ordered[_NAMED:]]:
        text += f" and {len(rest)} more, {format_bytes(sum(rest))}"
    return text
