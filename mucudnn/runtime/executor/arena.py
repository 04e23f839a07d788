"""Device memory for layouts used in turn: arenas, and a dynamic pool.

All layouts share the same bytes. Where a layout places tensors in chunks, the memory is
mapped to addresses once per layout, before any step runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mucudnn.backends import Device
from mucudnn.backends.base import Backend
from mucudnn.backends.device import Array, Buffer
from mucudnn.errors import OutOfMemoryError, UnsupportedError
from mucudnn.ir.sizes import format_bytes
from mucudnn.ir.tensor import TensorSpec
from mucudnn.passes.liveness import rounded
from mucudnn.passes.placement.layout import Layout


def shared_bytes(layouts: Sequence[Layout]) -> int:
    """Return the bytes of memory for all layouts, in whole chunks if one is mapped."""
    nbytes = max(layout.nbytes for layout in layouts)
    return rounded(nbytes, max(_chunk_sizes(layouts), default=1))


def arenas(backend: Backend, layouts: Sequence[Layout]) -> list[Buffer]:
    """Allocate one memory; return a buffer over it for each layout.

    Raises:
        OutOfMemoryError: There is no room for the memory, or for its addresses.
        UnsupportedError: A layout is to be mapped, and the backend cannot do that, or
            not in its chunks.
    """
    nbytes = shared_bytes(layouts)
    if all(layout.pages is None for layout in layouts):
        return [backend.device.allocate(nbytes)] * len(layouts)
    mapper, sizes = backend.mapper, _chunk_sizes(layouts)
    if mapper is None or any(size % mapper.chunk_bytes for size in sizes):
        found = "nothing" if mapper is None else f"chunks of {mapper.chunk_bytes} bytes"
        raise UnsupportedError(
            f"a layout has tensors in chunks of {max(sizes)} bytes, and backend "
            f"{backend.name!r} maps {found}; plan with a profile of this backend, or "
            "with the static placement"
        )
    memory = mapper.allocate(nbytes // mapper.chunk_bytes)
    return [memory.map(_chunks(a, nbytes, mapper.chunk_bytes)) for a in layouts]


def _chunks(layout: Layout, nbytes: int, chunk_bytes: int) -> Sequence[int]:
    """Return the device chunks behind a layout's consecutive addresses."""
    if layout.pages is None:
        return range(nbytes // chunk_bytes)
    parts = layout.pages.chunk_bytes // chunk_bytes
    return [
        chunk * parts + part for chunk in layout.pages.chunks for part in range(parts)
    ]


def _chunk_sizes(layouts: Sequence[Layout]) -> set[int]:
    return {each.pages.chunk_bytes for each in layouts if each.pages is not None}


# A best-fit pool for tensors that no schedule has placed.
#
# Planned steps have static offsets; allocations that are not planned take their bytes
# from this pool. Its arena is allocated once and never grows, so a pool cannot exceed
# its budget.
#
# A block takes the smallest hole that is large enough. When it is freed, it merges with
# the holes on both sides. A request that does not fit raises an error that names the
# live blocks.


_NAMED = 8


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Occupancy of a pool, now and at its peak.

    Attributes:
        reserved_bytes: Bytes of live blocks, each rounded up to the alignment.
        used_bytes: Requested bytes of live blocks.
        peak_bytes: Maximum of `reserved_bytes` so far.
        largest_hole: Bytes of the largest block that can be allocated now.
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
        """Bytes that belong to no block."""
        return self.nbytes - self.reserved_bytes

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes outside the largest hole."""
        return 1 - self.largest_hole / self.free_bytes if self.free_bytes else 0.0


@dataclass(frozen=True, slots=True)
class _Allocation:
    """Offset, requested bytes and reserved bytes of a block."""

    offset: int
    nbytes: int
    reserved: int


class BestFit:
    """Best-fit offsets of named blocks in a range of bytes, without any memory.

    Offsets are multiples of the arena alignment. If the length of the range is none,
    the last block may take the remainder.

    Args:
        nbytes: Length of the range; negative raises `ValueError`.
        where: Name of the range in error messages.
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
        """Iterate over the names of live blocks, the oldest first."""
        return iter(self._blocks)

    def offset(self, name: str) -> int:
        """Return a block's offset; `ValueError` if there is no such block."""
        return self._block(name).offset

    def size(self, name: str) -> int:
        """Return a block's requested bytes; `ValueError` if there is none."""
        return self._block(name).nbytes

    def fits(self, nbytes: int) -> bool:
        """Return whether a block of so many bytes can be allocated now."""
        return nbytes <= self.largest_hole

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest block that can be allocated now."""
        return max(self._holes.values(), default=0)

    def allocate(self, name: str, nbytes: int) -> int:
        """Allocate from the smallest sufficient hole; return the offset.

        Raises:
            OutOfMemoryError: No hole is large enough; names the live blocks, and what
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
        """Free a block; `ValueError` if there is none of that name."""
        block = self._block(name)
        del self._blocks[name]
        if block.reserved:
            start, nbytes = self._hole_without(block)
            self._holes.pop(block.offset + block.reserved, None)
            self._holes[start] = nbytes

    def clear(self) -> None:
        """Free all blocks."""
        self._blocks.clear()
        self._holes = {0: self.nbytes} if self.nbytes else {}

    @property
    def statistics(self) -> PoolStatistics:
        """Occupancy of the range, now and at its peak."""
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
            raise ValueError(
                f"{name!r} has no bytes of {self._where}; {self._live_blocks()}"
            )
        return self._blocks[name]

    def _cut(self, nbytes: int) -> _Allocation:
        """Take a block from the front of the smallest sufficient hole."""
        if nbytes == 0:
            return _Allocation(0, 0, 0)
        size, offset = min((n, at) for at, n in self._holes.items() if n >= nbytes)
        reserved = min(rounded(nbytes), size)
        del self._holes[offset]
        if size > reserved:
            self._holes[offset + reserved] = size - reserved
        return _Allocation(offset, nbytes, reserved)

    def _hole_without(self, block: _Allocation) -> tuple[int, int]:
        """Return the hole that freeing a block leaves: (offset, bytes)."""
        below = (at for at, n in self._holes.items() if at + n == block.offset)
        start = next(below, block.offset)
        end = block.offset + block.reserved
        return start, end + self._holes.get(end, 0) - start

    def _shortage(self, name: str, nbytes: int) -> str:
        now = self.statistics
        sizes = nbytes, self.nbytes, now.free_bytes, now.largest_hole
        needed, whole, free, hole = (format_bytes(size, *sizes) for size in sizes)
        return (
            f"no room for {name!r} of {needed} in {self._where} of {whole}: {free} are "
            f"free, the largest hole is {hole}; {self._live_blocks()}; "
            f"{self._remedy(nbytes)}"
        )

    def _live_blocks(self) -> str:
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
        freeing = f"freeing {min(enough)[1]!r} would make room, " if enough else ""
        return freeing + larger


class Pool:
    """One arena on a device, and the tensors in it.

    Not thread-safe. New blocks are uninitialized.
    """

    def __init__(self, device: Device, nbytes: int, name: str = "the pool") -> None:
        self.nbytes = nbytes
        self._device = device
        self._name = name
        self._blocks = BestFit(nbytes, name)
        self._arena: Buffer | None = device.allocate(nbytes)

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest block that can be allocated now."""
        return self._blocks.largest_hole

    @property
    def statistics(self) -> PoolStatistics:
        """Occupancy of the pool, now and at its peak."""
        return self._blocks.statistics

    def fits(self, nbytes: int) -> bool:
        """Return whether a block of so many bytes can be allocated now."""
        return self._blocks.fits(nbytes)

    def allocate(self, name: str, nbytes: int) -> None:
        """Allocate as `BestFit.allocate`; `ValueError` if the pool is closed."""
        self._opened()
        self._blocks.allocate(name, nbytes)

    def free(self, name: str) -> None:
        """Free the block of a name; `ValueError` if there is none."""
        self._blocks.free(name)

    def view(self, name: str, spec: TensorSpec) -> Array:
        """Return a tensor at the start of a block; it is valid until `free`.

        Raises `ValueError` if there is no such block, or it is smaller than the tensor.
        """
        held = self._blocks.size(name)
        if spec.nbytes > held:
            raise ValueError(
                f"{spec.dtype} {spec.shape} has {spec.nbytes} bytes, {name!r} has "
                f"{held} of {self._name}"
            )
        return self._device.view(self._opened(), self._blocks.offset(name), spec)

    def buffer(self, name: str) -> Buffer:
        """Return the bytes of a block; `ValueError` if there is none."""
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
    """Format names with sizes: `'x' (12.0 MiB), 'w' (1.0 MiB) and 3 more, 4.0 KiB`."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name!r} ({format_bytes(n)})" for name, n in ordered[:_NAMED])
    if rest := [nbytes for _, nbytes in ordered[_NAMED:]]:
        text += f" and {len(rest)} more, {format_bytes(sum(rest))}"
    return text
