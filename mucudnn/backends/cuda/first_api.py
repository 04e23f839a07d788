"""Descriptors of cuDNN's first API: made and set, and destroyed with their owner."""

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any

from mucudnn.backends.cuda._cudnn import Calls
from mucudnn.errors import MucudnnError, UnsupportedError

__all__ = ["Descriptors", "ints"]

_LARGEST_INT = 2**31 - 1


class Descriptors:
    """Those that belong to one call of the library.

    Args:
        calls: The library.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._made: list[tuple[str, int]] = []

    def __del__(self) -> None:
        for kind, pointer in self._made:
            with contextlib.suppress(MucudnnError):
                self._calls.call(f"cudnnDestroy{kind}Descriptor", pointer)

    def create(self, kind: str, setter: str, *values: Any) -> int:
        """The address of a new descriptor, which `cudnnSet…` of that name has set.

        Raises:
            MucudnnError: The library refuses the values.
        """
        address = self.empty(kind)
        self._calls.call(f"cudnnSet{setter}Descriptor", address, *values)
        return address

    def empty(self, kind: str) -> int:
        """The address of a new descriptor that is not set yet."""
        pointer = ctypes.c_void_p()
        self._calls.call(f"cudnnCreate{kind}Descriptor", ctypes.byref(pointer))
        address = pointer.value or 0
        self._made.append((kind, address))
        return address

    def tensor(
        self, data_type: int, shape: Sequence[int], strides: Sequence[int]
    ) -> int:
        """The address of a tensor's descriptor.

        Raises:
            UnsupportedError: A size or a stride is beyond the API's 32 bits.
        """
        sizes = ints(shape), ints(strides)
        return self.create("Tensor", "TensorNd", data_type, len(shape), *sizes)


def ints(values: Sequence[int]) -> Any:
    """An array of C integers.

    Raises:
        UnsupportedError: One is beyond 32 bits.
    """
    if any(value > _LARGEST_INT for value in values):
        raise UnsupportedError(
            f"{tuple(values)} does not fit the 32 bits of the first API"
        )
    return (ctypes.c_int * len(values))(*values)
