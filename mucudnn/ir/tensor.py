"""A tensor minus its data."""

import enum
import math
from dataclasses import dataclass

__all__ = ["INTEGERS", "ITEMSIZE", "Role", "TensorSpec", "itemsize"]

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes per element of every data type that is computed with."""

INTEGERS = {"uint8": 1, "int64": 8}
"""Bytes per element of labels, counters and positions."""


class Role(enum.Enum):
    """Why a tensor exists; decides who may move or drop it."""

    INPUT = "input"
    PARAMETER = "parameter"
    STATE = "state"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    BORROWED = "borrowed"
    """Memory of the caller: there from the first node to the last and after it, never
    moved, freed or overwritten in place."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape (as stored, slowest axis first), data type, and what it is for.

    Attributes:
        name: Unique in its graph.
        shape: Sizes; empty for a scalar.
        dtype: Data type.
        role: Inputs come from outside, parameters and state outlive a step.
        alias: The tensor whose bytes these are: of a view, or of what was computed in
            place. None for a tensor with bytes of its own.
        offset: Bytes of `alias` before its own: of a view of some of its rows.
        storage_bytes: Its size where that does not follow from shape and data type:
            another framework's type, strides or padding.
        layout: In which order an image's axes are stored: `NCHW`, or `NHWC` with the
            channels last.

    Raises:
        ValueError: Its size is asked for and not known.
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
        """Bytes: `storage_bytes`, or those of a densely packed tensor."""
        if self.storage_bytes is not None:
            return self.storage_bytes
        try:
            return math.prod(self.shape) * itemsize(self.dtype)
        except KeyError:
            raise ValueError(
                f"tensor {self.name!r} has the data type {self.dtype!r}, whose size is "
                "not known; give its storage_bytes"
            ) from None

    def sharing(self, alias: str | None) -> "TensorSpec":
        """The same with the bytes of another tensor; None for bytes of its own."""
        return self._like(self.name, self.role, alias)

    def again(self, name: str, alias: str | None) -> "TensorSpec":
        """Another activation of this kind."""
        return self._like(name, Role.ACTIVATION, alias)

    def _like(self, name: str, role: Role, alias: str | None) -> "TensorSpec":
        """A copy; `dataclasses.replace` takes five times as long."""
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
    """Bytes per element; KeyError for a type that has no name here."""
    return ITEMSIZE[dtype] if dtype in ITEMSIZE else INTEGERS[dtype]
