"""One prebuilt call: everything but the handle, which belongs to the thread."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Launch", "Operands"]


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel launch that takes no more decisions.

    Attributes:
        function: Called as `function(handle, *arguments)`, returns a status.
        arguments: Addresses and sizes.
        name: Of the C function, for errors.
        kept: What must live as long as this.
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
        """The largest power of two up to `most` that divides all three addresses."""
        return min(most, _lowest_bit(self.a | self.b | self.out | most))


def _lowest_bit(value: int) -> int:
    return value & -value
