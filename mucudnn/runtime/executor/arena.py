"""Device memory for layouts used in turn.

All layouts share the same bytes. Where a layout places tensors in chunks, the memory is
mapped to addresses once per layout, before any step runs.
"""

from collections.abc import Sequence

from mucudnn.backends.base import Backend
from mucudnn.backends.device import Buffer
from mucudnn.errors import UnsupportedError
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
