"""A prebuilt library call: everything but the handle, which belongs to the thread."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Launch", "Operands"]


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel launch without remaining decisions.

    Attributes:
        function: Called as `function(handle, *arguments)`, returns a status.
        arguments: Addresses and sizes.
        name: Name of the C function, for errors.
        kept: Objects that must live as long as the launch.
    """

    function: Callable[..., int]
    arguments: tuple[Any, ...]
    name: str
    kept: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Operands:
    """Addresses of two inputs, an output and a workspace of `nbytes`.

    In the order of `ConvLibrary.run`: (x, w) -> y, (dy, w) -> dx, (x, dy) -> dw.
    """

    a: int
    b: int
    out: int
    workspace: int
    nbytes: int

    def alignment(self, most: int) -> int:
        """Return the largest power of two up to `most` that divides all addresses."""
        bits = self.a | self.b | self.out | most
        return min(most, bits & -bits)
