"""Per-thread scratch memory for intermediate results, kept from call to call.

Fresh memory is mapped page by page as it is first written, which costs several times
as much as a pass of a formula, and allocators return large freed blocks to the system.
"""

import threading
from typing import Any

import numpy as np

__all__ = ["Scratch"]

_ALIGNMENT = 64  # bytes: a cache line


class Scratch(threading.local):
    """Per-thread memory as large as the largest piece of work so far."""

    def __init__(self) -> None:
        self._memory: Any = np.empty(0, np.uint8)
        self._taken = 0

    def restart(self) -> None:
        """Begin a piece of work: no array taken before is in use."""
        if self._taken > self._memory.size:
            self._memory = np.empty(0, np.uint8)  # free first, then allocate
            raw = np.empty(self._taken + _ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % _ALIGNMENT
            self._memory = raw[start : start + self._taken]
        self._taken = 0

    def take(self, size: int, dtype: Any) -> Any:
        """Return an uninitialised flat array; newly allocated if memory is short."""
        nbytes = size * np.dtype(dtype).itemsize
        start = self._taken
        self._taken += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._taken > self._memory.size:
            return np.empty(size, dtype)
        return self._memory[start : start + nbytes].view(dtype)

    def like(self, array: Any) -> Any:
        """Return the only array of a piece of work: dense, of this shape and type."""
        self.restart()
        return self.take(array.size, array.dtype).reshape(array.shape)
