"""Descriptors of cuDNN's first (legacy) API, destroyed with their owner."""

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any

from mucudnn.backends.cuda._cudnn import Calls
from mucudnn.errors import MucudnnError, UnsupportedError

__all__ = ["Descriptors", "ints"]

_LARGEST_INT = 2**31 - 1


class Descriptors:
    """The descriptors of one call of the library, destroyed with this object."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._made: list[tuple[str, int]] = []

    def __del__(self) -> None:
        for kind, pointer in self._made:
            with contextlib.suppress(MucudnnError):
                self._calls.call(f"cudnnDestroy{kind}Descriptor", pointer)

    def create(self, kind: str, setter: str, *values: Any) -> int:
        """Return the address of a new descriptor, set by a function `cudnnSet…`."""
        address = self.empty(kind)
        self._calls.call(f"cudnnSet{setter}Descriptor", address, *values)
        return address

    def empty(self, kind: str) -> int:
        """Return the address of a new descriptor without values."""
        pointer = ctypes.c_void_p()
        self._calls.call(f"cudnnCreate{kind}Descriptor", ctypes.byref(pointer))
        address = pointer.value or 0
        self._made.append((kind, address))
        return address

    def tensor(
        self, data_type: int, shape: Sequence[int], strides: Sequence[int]
    ) -> int:
        """Return the address of a tensor descriptor."""
        sizes = ints(shape), ints(strides)
        return self.create("Tensor", "TensorNd", data_type, len(shape), *sizes)


def ints(values: Sequence[int]) -> Any:
    """Return an array of C integers."""
    if any(value > _LARGEST_INT for value in values):
        raise UnsupportedError(
            f"{tuple(values)} does not fit the 32 bits of the first API"
        )
    return (ctypes.c_int * len(values))(*values)
