"""Device memory for layouts used in turn: arenas, and a dynamic pool.

All layouts share the same bytes. Where a layout places tensors in chunks, the memory is
mapped to addresses once per layout, before any step runs.
"""

from collections.abc import Mapping, Sequence
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
    # The layouts are used in turn, so the largest one decides.
    nbytes = max(layout.nbytes for layout in layouts)
    return rounded(nbytes, max(_chunk_sizes(layouts), default=1))


def arenas(backend: Backend, layouts: Sequence[Layout]) -> list[Buffer]:
    """Allocate one memory; return a buffer over it for each layout."""
    nbytes = shared_bytes(layouts)
    if all(layout.pages is None for layout in layouts):
        return [backend.device.allocate(nbytes)] * len(layouts)
    mapper, sizes = backend.mapper, _chunk_sizes(layouts)
    if mapper is None or any(size % mapper.chunk_bytes for size in sizes):
        found = "nothing" if mapper is None else f"chunks of {mapper.chunk_bytes} bytes"
        raise UnsupportedError(
            f"the plan maps memory in chunks of {max(sizes)} bytes, and backend "
            f"{backend.name!r} in chunks of {found}; plan with a profile of this "
            "backend, or with the static placement"
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
# its budget. A request that does not fit raises an error that names the live blocks.


_NAMED = 8
"""Maximum number of live blocks that an error names."""


@dataclass(frozen=True, slots=True)
class Block:
    """Requested bytes of an arena, and those reserved with the alignment."""

    offset: int
    nbytes: int
    reserved: int


class Pool:
    """Named blocks in one arena of a device, placed best-fit.

    Offsets are multiples of the arena alignment. If the length of the arena is none,
    the last block may take the remainder.

    Args:
        device: Device whose memory the arena takes.
        nbytes: Length of the arena; negative raises `ValueError`.
        name: Name of the pool in error messages.

    Attributes:
        blocks: Live blocks by name.
        holes: Offset -> bytes of each free range.
    """

    def __init__(self, device: Device, nbytes: int, name: str = "the pool") -> None:
        if nbytes < 0:
            raise ValueError(
                f"the size of a pool must be at least 0 bytes, got {nbytes}"
            )
        self.nbytes = nbytes
        self.blocks: dict[str, Block] = {}
        self.holes = {0: nbytes} if nbytes else {}
        self._device = device
        self._name = name
        self._arena: Buffer | None = device.allocate(nbytes)

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest block that can be allocated now."""
        return max(self.holes.values(), default=0)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of live blocks, each rounded up to the alignment."""
        return sum(block.reserved for block in self.blocks.values())

    def allocate(self, name: str, nbytes: int) -> int:
        """Allocate from the smallest sufficient hole; return the offset."""
        self._opened()
        if name in self.blocks:
            raise ValueError(
                f"{name!r} already has {format_bytes(self.blocks[name].nbytes)} in "
                f"{self._name}; free it first"
            )
        if nbytes < 0:
            raise ValueError(
                f"the size of {name!r} must be at least 0 bytes, got {nbytes}"
            )
        if nbytes > self.largest_hole:
            raise OutOfMemoryError(self._shortage(name, nbytes))
        offset = reserved = 0
        if nbytes:
            # Best fit: the smallest sufficient hole leaves the large ones for large
            # tensors.
            fitting = ((n, at) for at, n in self.holes.items() if n >= nbytes)
            size, offset = min(fitting)
            reserved = min(rounded(nbytes), size)
            del self.holes[offset]
            if size > reserved:
                self.holes[offset + reserved] = size - reserved
        self.blocks[name] = Block(offset, nbytes, reserved)
        return offset

    def free(self, name: str) -> None:
        """Free a block; it merges with the holes on both sides."""
        block = self._block(name)
        del self.blocks[name]
        if block.reserved:
            start, nbytes = self._hole_without(block)
            self.holes.pop(block.offset + block.reserved, None)
            self.holes[start] = nbytes

    def view(self, name: str, spec: TensorSpec) -> Array:
        """Return a tensor at the start of a block."""
        block = self._block(name)
        if spec.nbytes > block.nbytes:
            raise ValueError(
                f"{spec.dtype} {spec.shape} has {spec.nbytes} bytes, {name!r} has "
                f"{block.nbytes} of {self._name}"
            )
        return self._device.view(self._opened(), block.offset, spec)

    def buffer(self, name: str) -> Buffer:
        """Return the bytes of a block."""
        spec = TensorSpec("bytes", (self._block(name).nbytes,), "uint8")
        return self.view(name, spec)

    def close(self) -> None:
        """Free the arena once no view is left; may be called again."""
        self.blocks.clear()
        self._arena = None
        self._device.trim()

    def _opened(self) -> Buffer:
        if self._arena is None:
            raise ValueError(f"{self._name} was closed; make another")
        return self._arena

    def _block(self, name: str) -> Block:
        if name not in self.blocks:
            raise ValueError(
                f"{name!r} has no bytes of {self._name}; {self._live_blocks()}"
            )
        return self.blocks[name]

    def _hole_without(self, block: Block) -> tuple[int, int]:
        """Return (offset, bytes) of the hole that freeing a block would leave."""
        below = (at for at, n in self.holes.items() if at + n == block.offset)
        start = next(below, block.offset)
        end = block.offset + block.reserved
        return start, end + self.holes.get(end, 0) - start

    def _live_blocks(self) -> str:
        if not self.blocks:
            return "nothing is alive"
        sizes = {name: block.nbytes for name, block in self.blocks.items()}
        return f"alive are {largest_first(sizes)}"

    def _shortage(self, name: str, nbytes: int) -> str:
        free = self.nbytes - self.reserved_bytes
        sizes = nbytes, self.nbytes, free, self.largest_hole
        needed, whole, left, hole = (format_bytes(size, *sizes) for size in sizes)
        wanted = self.reserved_bytes + rounded(nbytes)
        remedy = f"a pool of {wanted} bytes would do"
        if wanted <= self.nbytes:
            remedy = f"its {len(self.holes)} holes would do if they were one"
        enough = [
            (block.nbytes, name)
            for name, block in self.blocks.items()
            if block.reserved and self._hole_without(block)[1] >= nbytes
        ]
        if enough:
            remedy = f"freeing {min(enough)[1]!r} would make room, {remedy}"
        return (
            f"no room for {name!r} of {needed} in {self._name} of {whole}: {left} are "
            f"free, the largest hole is {hole}; {self._live_blocks()}; {remedy}"
        )


def largest_first(sizes: Mapping[str, int]) -> str:
    """Format names with sizes: `'x' (12.0 MiB), 'w' (1.0 MiB) and 3 more, 4.0 KiB`."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name!r} ({format_bytes(n)})" for name, n in ordered[:_NAMED])
    if rest := [nbytes for _, nbytes in ordered[_NAMED:]]:
        text += f" and {len(rest)} more, {format_bytes(sum(rest))}"
    return text
