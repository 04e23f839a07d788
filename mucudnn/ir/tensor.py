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
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    role: Role = Role.ACTIVATION
    alias: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of a densely packed tensor."""
        return math.prod(self.shape) * itemsize(self.dtype)


def itemsize(dtype: str) -> int:
    """Bytes per element; KeyError for a type that has no name here."""
    return ITEMSIZE[dtype] if dtype in ITEMSIZE else INTEGERS[dtype]
