"""What a device must provide that can map its memory: chunks of it, under any address.

A buffer is a row of addresses with a chunk of memory behind each piece of them, and one
chunk may be behind several. So what is free in pieces becomes one tensor, and nothing
is copied. Mapping takes time and waits for the device: it is done before a step runs
for the first time, never within one.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol

from mucudnn.backends.device import Buffer

__all__ = ["MappedMemory", "Mapper", "runs"]


class MappedMemory(Protocol):
    """Chunks that were allocated together; freed with the last buffer over them."""

    def map(self, chunks: Sequence[int]) -> Buffer:
        """New addresses in a row, of these chunks in this order.

        They are taken back when the last reference to the buffer is dropped. What is
        written under one address is read under all that the chunk has, by whatever
        begins after the writer is done.

        Raises:
            OutOfMemoryError: There are no addresses left.
            BackendError: The driver refused, or work is being captured.
        """
        ...


class Mapper(Protocol):
    """Allocates memory in chunks."""

    @property
    def chunk_bytes(self) -> int:
        """The unit that is mapped."""
        ...

    def allocate(self, chunks: int) -> MappedMemory:
        """So many chunks of memory, all of them there.

        Raises:
            OutOfMemoryError: There is no room.
            UnsupportedError: This system cannot map memory.
        """
        ...


def runs(chunks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Chunks that follow one another: (position, first chunk, how many)."""
    for _, group in groupby(enumerate(chunks), key=lambda pair: pair[1] - pair[0]):
        (at, first), *rest = group
        yield at, first, 1 + len(rest)
