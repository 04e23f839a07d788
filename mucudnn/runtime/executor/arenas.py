"""Memory for layouts that are used in turn: one arena, or one and its addresses.

Where a layout has tensors in pieces, the memory is mapped: once for each layout, before
any of them runs. All layouts are over the same bytes.
"""

from collections.abc import Sequence

from mucudnn.backends.base import Backend, Buffer
from mucudnn.errors import UnsupportedError
from mucudnn.passes.liveness import rounded
from mucudnn.passes.placement.layout import Layout

__all__ = ["arenas", "shared_bytes"]


def shared_bytes(layouts: Sequence[Layout]) -> int:
    """Bytes of memory for layouts that are used in turn; chunks where one has them."""
    nbytes = max(layout.nbytes for layout in layouts)
    return rounded(nbytes, max(map(_chunk_bytes, layouts)))


def arenas(backend: Backend, layouts: Sequence[Layout]) -> list[Buffer]:
    """A buffer for each layout, all of them over the same memory.

    Raises:
        OutOfMemoryError: There is no room for the memory, or for its addresses.
        UnsupportedError: A layout is to be mapped, and the backend cannot do that, or
            not in its chunks.
    """
    nbytes = shared_bytes(layouts)
    if all(layout.pages is None for layout in layouts):
        return [backend.device.allocate(nbytes)] * len(layouts)
    mapper, sizes = backend.mapper, set(map(_chunk_bytes, layouts)) - {1}
    if mapper is None or any(size % mapper.chunk_bytes for size in sizes):
        found = "nothing" if mapper is None else f"chunks of {mapper.chunk_bytes} bytes"
        raise UnsupportedError(
            f"a layout has tensors in chunks of {max(sizes)} bytes, and backend "
            f"{backend.name!r} maps {found}; plan with a profile of it, or statically"
        )
    memory = mapper.allocate(nbytes // mapper.chunk_bytes)
    return [memory.map(_chunks(a, nbytes, mapper.chunk_bytes)) for a in layouts]


def _chunks(layout: Layout, nbytes: int, chunk_bytes: int) -> Sequence[int]:
    """What is behind the addresses of a layout, in the chunks of a device."""
    if layout.pages is None:
        return range(nbytes // chunk_bytes)
    parts = layout.pages.chunk_bytes // chunk_bytes
    return [
        chunk * parts + part for chunk in layout.pages.chunks for part in range(parts)
    ]


def _chunk_bytes(layout: Layout) -> int:
    return 1 if layout.pages is None else layout.pages.chunk_bytes
