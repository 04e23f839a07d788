"""What a kernel of the library is asked for, and what it is called with."""

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.backends.cuda._cudnn import Calls
from mucudnn.backends.cuda.conv.geometry import DATA_TYPES, strides_of
from mucudnn.backends.cuda.first_api import Descriptors
from mucudnn.ir.operations import LIBRARY

__all__ = ["Arguments", "Case", "LibraryOperation", "Shaped", "describable"]

_MOST = 2**31 - 1
"""Elements of a tensor: the first API counts in 32 bits."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """A dense tensor as a kernel is given it."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Any) -> "Shaped":
        """Of an array, or of what describes one."""
        dtype = tensor.dtype
        return cls(tuple(tensor.shape), dtype if isinstance(dtype, str) else dtype.name)


@dataclass(frozen=True, slots=True)
class Case:
    """An operation on certain tensors: all that decides whether the library takes it.

    Attributes:
        op: The operation.
        inputs: What it reads.
        outputs: What it writes.
        settings: Its attributes, by name.
    """

    op: str
    inputs: tuple[Shaped, ...]
    outputs: tuple[Shaped, ...]
    settings: tuple[tuple[str, Any], ...]

    @classmethod
    def of(
        cls,
        op: str,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        attrs: Mapping[str, Any],
    ) -> "Case":
        """Of arrays, or of what describes them."""
        settings = sorted((k, v) for k, v in attrs.items() if k != LIBRARY)
        reads, writes = (tuple(map(Shaped.of, each)) for each in (inputs, outputs))
        return cls(op, reads, writes, tuple(settings))

    def __getitem__(self, name: str) -> Any:
        """An attribute of the operation."""
        return dict(self.settings)[name]

    def __str__(self) -> str:
        shapes = ", ".join(f"{t.dtype} {t.shape}" for t in self.inputs)
        return f"{self.op} of {shapes}"


class Arguments:
    """Descriptors and factors of one call, which live as long as this.

    Args:
        calls: The library.
        dtype: Of the images.
    """

    def __init__(self, calls: Calls, dtype: str) -> None:
        self.calls, self.descriptors = calls, Descriptors(calls)
        self._dtype = dtype
        scalar = ctypes.c_double if dtype == "float64" else ctypes.c_float
        self._factors = scalar(1.0), scalar(0.0)

    @property
    def one(self) -> int:
        """The address of the factor 1."""
        return ctypes.addressof(self._factors[0])

    @property
    def zero(self) -> int:
        """The address of the factor 0: what was in a result is overwritten."""
        return ctypes.addressof(self._factors[1])

    def tensor(self, shape: Sequence[int], *, channels_last: bool) -> int:
        """The descriptor of a dense image; axes are written (N, C, *spatial)."""
        strides = strides_of(shape, channels_last=channels_last)
        return self.descriptors.tensor(DATA_TYPES[self._dtype], shape, strides)


@dataclass(frozen=True, slots=True)
class LibraryOperation:
    """How the library computes an operation.

    Attributes:
        function: Its name in C.
        takes: Whether it is the same function there, and within what is documented.
        arguments: (case, what keeps them, addresses of inputs and of outputs) -> the
            arguments after the handle.
        unwritten: Positions of results that the library does not write.
        left: Attributes by which our own kernel computes what the library leaves to
            it, from what the library has written. None: nothing is left.
    """

    function: str
    takes: Callable[[Case], bool]
    arguments: Callable[
        [Case, Arguments, Sequence[int], Sequence[int]], tuple[Any, ...]
    ]
    unwritten: tuple[int, ...] = ()
    left: Mapping[str, Any] | None = None


def describable(*tensors: Shaped) -> bool:
    """Whether tensors of one type have elements, and not too many to be described."""
    return (
        tensors[0].dtype in DATA_TYPES
        and len({tensor.dtype for tensor in tensors}) == 1
        and all(0 < math.prod(tensor.shape) <= _MOST for tensor in tensors)
    )
