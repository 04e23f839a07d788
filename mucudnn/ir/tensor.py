"""Tensor descriptions without data."""

import enum
import math
from dataclasses import dataclass

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes per element of floating-point data types."""

INTEGERS = {"uint8": 1, "int64": 8}
"""Bytes per element of integer data types: labels, counters, indices."""

_ITEMSIZE = ITEMSIZE | INTEGERS


class Role(enum.Enum):
    """Purpose of a tensor; decides who may move or drop it."""

    INPUT = "input"
    PARAMETER = "parameter"
    STATE = "state"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    BORROWED = "borrowed"
    """Memory of the caller: resident during and after the step, never moved, freed or
    overwritten in place."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape (as stored, slowest axis first), data type and role of a tensor.

    Attributes:
        name: Unique name in the graph.
        shape: Sizes; empty for a scalar.
        dtype: Data type.
        role: Inputs come from outside, parameters and state outlive a step.
        alias: Tensor whose storage a view or an in-place result shares; None for a
            tensor with its own storage.
        offset: Byte offset in `alias`, for a view of a row range.
        storage_bytes: Size if it does not follow from shape and data type: another
            framework's type, strides or padding.
        layout: Order in which an image's axes are stored: `NCHW`, or `NHWC` with the
            channels last.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    role: Role = Role.ACTIVATION
    alias: str | None = None
    storage_bytes: int | None = None
    offset: int = 0
    layout: str = "NCHW"

    @property
    def nbytes(self) -> int:
        """Size in bytes: `storage_bytes`, or that of a densely packed tensor."""
        if self.storage_bytes is not None:
            return self.storage_bytes
        try:
            return math.prod(self.shape) * _ITEMSIZE[self.dtype]
        except KeyError:
            raise ValueError(
                f"tensor {self.name!r} has the data type {self.dtype!r}, whose size "
                "is unknown; give its storage_bytes"
            ) from None

    def sharing(self, alias: str | None) -> "TensorSpec":
        """Return a copy that shares another tensor's storage; with None, its own."""
        return self._like(self.name, self.role, alias)

    def again(self, name: str, alias: str | None) -> "TensorSpec":
        """Return an activation of the same shape and type."""
        return self._like(name, Role.ACTIVATION, alias)

    def _like(self, name: str, role: Role, alias: str | None) -> "TensorSpec":
        """Return a copy; `dataclasses.replace` takes five times as long."""
        return TensorSpec(
            name,
            self.shape,
            self.dtype,
            role,
            alias,
            self.storage_bytes,
            self.offset,
            self.layout,
        )


def itemsize(dtype: str) -> int:
    """Return the bytes per element; KeyError for an unknown type."""
    return _ITEMSIZE[dtype]
