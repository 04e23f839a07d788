"""Addresses and the memory behind them: what is in pieces is in one piece by address.

Device memory is cut into chunks, and a chunk may be mapped under several addresses at
once. So everything that some step needs is mapped before it runs for the first time,
and nothing while it runs: a tensor that lies in pieces has addresses of its own, in a
row, and finds its bytes there in every step. What lies in one piece needs none of its
own: the first addresses are those of the memory itself, chunk by chunk.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mucudnn.ir.profile import ChunkCosts

__all__ = ["Extent", "PageTable", "joined", "with_addresses"]


class Extent(NamedTuple):
    """Bytes in one piece.

    Attributes:
        start: First byte.
        stop: The byte after the last.
    """

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PageTable:
    """Which chunk of the memory is behind each chunk of the addresses.

    Attributes:
        chunk_bytes: Size of a chunk.
        chunks: Of the memory, in the order of addresses.
    """

    chunk_bytes: int
    chunks: tuple[int, ...]

    @property
    def address_bytes(self) -> int:
        """Bytes of all addresses."""
        return len(self.chunks) * self.chunk_bytes

    def map_ms(self, costs: ChunkCosts) -> float:
        """What it takes to map all of it, once."""
        return len(self.chunks) * costs.map_ms

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        """Where in the memory the bytes of some addresses are, in order."""
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
    """Bytes in order, in as few pieces as they are."""
    found: list[Extent] = []
    for start, stop in pieces:
        if found and found[-1].stop == start:
            start = found.pop().start
        found.append(Extent(start, stop))
    return tuple(found)


def with_addresses(
    places: Mapping[str, Sequence[Extent]], chunk_bytes: int
) -> tuple[dict[str, int], PageTable | None]:
    """Addresses for bytes in pieces, and the memory behind them.

    Args:
        places: Name -> its pieces, such that inner ends are those of chunks.
        chunk_bytes: Size of a chunk.

    Returns:
        Name -> its first address, and the table: None where everything is in one piece,
        so that addresses are places.
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
    """Chunks that the pieces are in, in order."""
    for piece in pieces:
        yield from range(piece.start // chunk_bytes, -(-piece.stop // chunk_bytes))
