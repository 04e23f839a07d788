"""A tensor minus its data."""

import math
from dataclasses import dataclass

__all__ = ["ITEMSIZE", "TensorSpec"]

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes per element of every data type the library has a name for."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape (as stored, slowest axis first) and data type."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """Bytes of a densely packed tensor."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]
