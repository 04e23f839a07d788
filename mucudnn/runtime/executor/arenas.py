"""Allocate memory for layouts that are used in turn.

All layouts share the same bytes. Where a layout places tensors in chunks, the memory is
mapped to addresses once per layout, before any step runs.
"""

from collections.abc import Sequence

from mucudnn.backends.base import Backend, Buffer
from mucudnn.errors import UnsupportedError
from mucudnn.passes.liveness import rounded
from mucudnn.passes.placement.layout import Layout

__all__ = ["arenas", "shared_bytes"]


def shared_bytes(layouts: Sequence[Layout]) -> int:
    """Return the bytes of memory for all layouts, in whole chunks if one is mapped."""
    nbytes = max(layout.nbytes for layout in layouts)
    return rounded(nbytes, max(map(_chunk_bytes, layouts)))


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
    mapper, sizes = backend.mapper, set(map(_chunk_bytes, layouts)) - {1}
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


def _chunk_bytes(layout: Layout) -> int:
    return 1 if layout.pages is None else layout.pages.chunk_bytes
