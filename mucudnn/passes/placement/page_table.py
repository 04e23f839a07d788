"""Page table of virtual addresses that make scattered tensors contiguous.

Device memory consists of chunks, and a chunk may be mapped at several addresses at
once. All mappings of a step are made before its first run. A tensor in several pieces
has a contiguous address range of its own, which is valid in every step. A tensor in one
piece needs none: the first addresses map the memory itself, chunk by chunk.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mucudnn.ir.profile import ChunkCosts

__all__ = ["Extent", "PageTable", "joined", "with_addresses"]


class Extent(NamedTuple):
    """A contiguous range of bytes from `start` to `stop` (exclusive)."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PageTable:
    """Memory chunk behind each chunk of addresses.

    Attributes:
        chunk_bytes: Size of a chunk.
        chunks: Numbers of memory chunks, in the order of addresses.
    """

    chunk_bytes: int
    chunks: tuple[int, ...]

    @property
    def address_bytes(self) -> int:
        """Bytes of the whole address range."""
        return len(self.chunks) * self.chunk_bytes

    def map_ms(self, costs: ChunkCosts) -> float:
        """Return the time to map all chunks."""
        return len(self.chunks) * costs.map_ms

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        """Return the memory extents behind a range of addresses, in order."""
        size = self.chunk_bytes
        moves = (
            (at, (self.chunks[at] - at) * size)
            for at in range(start // size, -(-stop // size))
        )
        return joined(
            Extent(max(start, at * size) + move, min(stop, (at + 1) * size) + move)
            for at, move in moves
        )


def joined(pieces: Iterable[Extent]) -> tuple[Extent, ...]:
    """Merge adjacent extents of a sequence."""
    found: list[Extent] = []
    for start, stop in pieces:
        if found and found[-1].stop == start:
            start = found.pop().start
        found.append(Extent(start, stop))
    return tuple(found)


def with_addresses(
    places: Mapping[str, Sequence[Extent]], chunk_bytes: int
) -> tuple[dict[str, int], PageTable | None]:
    """Assign contiguous addresses to scattered tensors.

    Returns:
        First address of each tensor, and the page table: None if all tensors are
        contiguous, so that addresses are offsets.
    """
    ends = (pieces[-1].stop for pieces in places.values())
    scattered = {name: p for name, p in places.items() if len(p) > 1}
    offsets = {name: pieces[0].start for name, pieces in places.items()}
    if not scattered:
        return offsets, None
    tops = (piece.stop for pieces in scattered.values() for piece in pieces)
    table = list(range(-(-max(*ends, *tops) // chunk_bytes)))
    known: dict[tuple[int, ...], int] = {}
    for name, pieces in scattered.items():
        chunks = tuple(_chunks(pieces, chunk_bytes))
        if chunks not in known:
            known[chunks] = len(table) * chunk_bytes
            table += chunks
        offsets[name] = known[chunks] + pieces[0].start % chunk_bytes
    return offsets, PageTable(chunk_bytes, tuple(table))


def _chunks(pieces: Sequence[Extent], chunk_bytes: int) -> Iterator[int]:
    for piece in pieces:
        yield from range(piece.start // chunk_bytes, -(-piece.stop // chunk_bytes))
