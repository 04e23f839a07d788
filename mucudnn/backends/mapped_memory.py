"""The interface of devices that can map memory: chunks at any addresses.

A buffer is a range of addresses, each chunk of which is backed by a chunk of memory; a
chunk may be mapped several times. So fragmented free memory becomes one tensor without
a copy. Mapping takes time and synchronizes the device: it is done before a step runs
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


def runs(chunks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (position, first chunk, count) of each run of consecutive chunks."""
    for _, group in groupby(enumerate(chunks), key=lambda pair: pair[1] - pair[0]):
        (at, first), *rest = group
        yield at, first, 1 + len(rest)
