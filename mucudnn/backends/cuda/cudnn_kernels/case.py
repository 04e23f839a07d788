"""The description of an operation for the library, and the arguments of its call."""

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

_MOST = 2**31 - 1  # most elements of a tensor: the first API counts in 32 bits


@dataclass(frozen=True, slots=True)
class Shaped:
    """Shape and type of a dense tensor."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Any) -> "Shaped":
        """Describe an array or a tensor specification."""
        dtype = tensor.dtype
        return cls(tuple(tensor.shape), dtype if isinstance(dtype, str) else dtype.name)


@dataclass(frozen=True, slots=True)
class Case:
    """An operation with its shapes and attributes, the input of `takes`.

    Attributes:
        op: Name of the operation.
        inputs: Input tensors.
        outputs: Output tensors.
        settings: Attributes of the operation, by name.
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
        """Describe an operation on arrays or tensor specifications."""
        settings = sorted((k, v) for k, v in attrs.items() if k != LIBRARY)
        reads, writes = (tuple(map(Shaped.of, each)) for each in (inputs, outputs))
        return cls(op, reads, writes, tuple(settings))

    def __getitem__(self, name: str) -> Any:
        return dict(self.settings)[name]

    def __str__(self) -> str:
        shapes = ", ".join(f"{t.dtype} {t.shape}" for t in self.inputs)
        return f"{self.op} of {shapes}"


class Arguments:
    """Descriptors and factors of one call, for images of type `dtype`."""

    def __init__(self, calls: Calls, dtype: str) -> None:
        self.calls, self.descriptors = calls, Descriptors(calls)
        self._dtype = dtype
        scalar = ctypes.c_double if dtype == "float64" else ctypes.c_float
        self._factors = scalar(1.0), scalar(0.0)

    @property
    def one(self) -> int:
        """Address of the factor 1."""
        return ctypes.addressof(self._factors[0])

    @property
    def zero(self) -> int:
        """Address of the factor 0: results are overwritten."""
        return ctypes.addressof(self._factors[1])

    def tensor(self, shape: Sequence[int], *, channels_last: bool) -> int:
        """Return the descriptor of a dense image; axes are written (N, C, *spatial)."""
        strides = strides_of(shape, channels_last=channels_last)
        return self.descriptors.tensor(DATA_TYPES[self._dtype], shape, strides)


@dataclass(frozen=True, slots=True)
class LibraryOperation:
    """An operation as the library computes it.

    Attributes:
        function: Name of the C function.
        takes: Returns whether it computes the same function, within documented limits.
        arguments: (case, owner of the descriptors, addresses of inputs and of outputs)
            -> arguments after the handle.
        unwritten: Positions of results that the library does not write.
        left: Attributes with which our own kernel completes the library's results.
            None: the results are complete.
    """

    function: str
    takes: Callable[[Case], bool]
    arguments: Callable[
        [Case, Arguments, Sequence[int], Sequence[int]], tuple[Any, ...]
    ]
    unwritten: tuple[int, ...] = ()
    left: Mapping[str, Any] | None = None


def describable(*tensors: Shaped) -> bool:
    """Return whether the tensors have one type, elements, and 32-bit sizes."""
    return (
        tensors[0].dtype in DATA_TYPES
        and len({tensor.dtype for tensor in tensors}) == 1
        and all(0 < math.prod(tensor.shape) <= _MOST for tensor in tensors)
    )
