"""Memory of a thread's own for intermediate results, kept from call to call.

Fresh memory is mapped page by page as it is first written, which costs several times
what a pass of a formula does, and allocators hand back what is large and freed.
"""

import threading
from typing import Any

import numpy as np

__all__ = ["Scratch"]

_ALIGNMENT = 64  # bytes: a cache line


class Scratch(threading.local):
    """As many bytes a thread as were asked for at once."""

    def __init__(self) -> None:
        self._memory: Any = np.empty(0, np.uint8)

    def like(self, array: Any) -> Any:
        """A dense array of this shape and type, whose contents are anything.

        It is the memory that this thread was given before: one at a time is in use.
        """
        nbytes = array.size * array.itemsize
        if self._memory.size < nbytes:
            self._memory = None  # before there is more
            raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % _ALIGNMENT
            self._memory = raw[start : start + nbytes]
        return self._memory[:nbytes].view(array.dtype).reshape(array.shape)
