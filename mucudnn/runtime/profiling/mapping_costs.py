"""Measure the cost of mapping memory on a backend; once before the first step."""

import statistics
from collections.abc import Callable

from mucudnn.backends.base import Backend
from mucudnn.errors import UnsupportedError
from mucudnn.ir.profile import ChunkCosts

__all__ = ["mapping_costs"]

_CHUNKS = 64
_SAMPLES = 5


def mapping_costs(backend: Backend, memory: int | None = None) -> ChunkCosts:
    """Time the mapping and unmapping of non-contiguous chunks.

    At most `memory` bytes are allocated meanwhile; if they are less than a chunk,
    nothing is timed.

    Raises:
        UnsupportedError: The backend cannot map memory.
        OutOfMemoryError: There is no room for a few chunks.
    """
    mapper, device = backend.mapper, backend.device
    if mapper is None:
        raise UnsupportedError(
            f"backend {backend.name!r} cannot map memory; use the static placement"
        )
    size = mapper.chunk_bytes
    count = _CHUNKS if memory is None else min(_CHUNKS, memory // size)
    if count < 1:
        return ChunkCosts(size)
    chunks = range(count - 1, -1, -1)  # descending: no two merge into one mapping
    held = mapper.allocate(count)
    rows = [held.map(chunks)]

    def timed(work: Callable[[], object]) -> float:
        start = device.record()
        work()
        return device.elapsed_ms(start, device.record()) / count

    times = [
        (timed(lambda: rows.append(held.map(chunks))), timed(rows.pop))
        for _ in range(_SAMPLES)
    ]
    maps, unmaps = zip(*times, strict=True)
    return ChunkCosts(size, statistics.median(maps), statistics.median(unmaps))
