"""Pages of mapped files: not our memory once they are copied.

A page of a file that was touched counts as the process's own until the system needs it.
Data that has left for a file would so be in memory after all.
"""

import mmap
from typing import Any

import numpy as np

__all__ = ["let_go_of_pages"]


def let_go_of_pages(view: Any) -> None:
    """Give the pages of a view back to the system, if they are those of a file.

    Nothing is lost: what was written to them goes to the file, what is read again comes
    from there, or from the system's cache of it.
    """
    owner = view
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = view.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    owner.madvise(mmap.MADV_DONTNEED, first, start + view.nbytes - first)
