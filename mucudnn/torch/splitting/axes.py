"""Where the batch is in a tensor, and whether its samples are bytes in a row."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mucudnn.torch.lowering.lowered import Layout, Operand

__all__ = ["Axis", "Cut", "Rule", "Site", "in_rows", "of_rows"]


@dataclass(frozen=True, slots=True)
class Axis:
    """The axis of a tensor along which samples follow each other.

    Attributes:
        index: Which axis.
        each: Entries along it that belong to one sample.
    """

    index: int
    each: int = 1

    def fits(self, layout: Layout, batch: int) -> bool:
        """Whether a tensor has so many samples along it."""
        rank = len(layout.shape)
        return self.index < rank and layout.shape[self.index] == self.each * batch


@dataclass(frozen=True, slots=True)
class Cut:
    """How a call is cut into calls of some samples each.

    Attributes:
        inputs: Operand -> where the samples are that a slice reads; it reads all of
            those that are not named.
        outputs: Where the samples of each result are; None for a sum of what slices
            compute.
        shaped: Arguments that are the shape of the first result.
        counted: Arguments that are the number of samples.
        averaged: Whether the whole call divides by the number of samples: what a slice
            of n of N computes has to be multiplied by n / N.
    """

    inputs: Mapping[int, Axis]
    outputs: tuple[Axis | None, ...]
    shaped: tuple[int, ...] = ()
    counted: tuple[int, ...] = ()
    averaged: bool = False


@dataclass(frozen=True, slots=True)
class Site:
    """A call in a graph, with what is known of the batch before it.

    Attributes:
        op: The operation's name.
        args: Its arguments.
        kwargs: Those by name.
        results: Where its outputs are in what it returns.
        inputs: How its operands lie.
        outputs: How its results lie.
        axes: Where the batch is in each operand; None if it is not known to have one.
        batch: Samples.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[int | None, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    axes: tuple[Axis | None, ...]
    batch: int

    def arg(self, position: int, default: Any = None) -> Any:
        """An argument by its position, or what it is if it is not given."""
        return self.args[position] if position < len(self.args) else default

    def operand(self, position: int) -> int | None:
        """Which operand an argument is; None if it is none."""
        found = self.arg(position)
        return found.index if isinstance(found, Operand) else None

    def axis(self, position: int) -> Axis | None:
        """Where the batch is in an argument."""
        index = self.operand(position)
        return None if index is None else self.axes[index]

    def shape(self, position: int) -> tuple[int, ...]:
        """Sizes of an argument that is a tensor."""
        index = self.operand(position)
        return () if index is None else self.inputs[index].shape

    def at(self, axes: Mapping[int, Axis]) -> dict[int, Axis]:
        """Operand -> axis, from positions of arguments that are operands."""
        return {
            index: axis
            for position, axis in axes.items()
            if (index := self.operand(position)) is not None
        }


Rule = Callable[[Site], Cut | None]
"""How a call is cut; None if it is not known to be the same slice by slice."""


def in_rows(layout: Layout, axis: Axis, nbytes: int, batch: int) -> bool:
    """Whether every sample is its own stretch of a storage of so many bytes."""
    if nbytes % batch or not nbytes or not axis.fits(layout, batch):
        return False
    item = layout.dtype.itemsize
    row = nbytes // batch
    if layout.stride[axis.index] * axis.each * item != row:
        return False
    sizes = list(layout.shape)
    sizes[axis.index] = axis.each
    if 0 in sizes:
        return False
    strides = zip(sizes, layout.stride, strict=True)
    last = layout.offset + sum((size - 1) * stride for size, stride in strides)
    return bool((last + 1) * item <= row)


def of_rows(layout: Layout, axis: Axis, samples: int, before: int = 0) -> Layout:
    """How some samples of a tensor lie, in a storage with so many others before."""
    sizes = list(layout.shape)
    sizes[axis.index] = samples * axis.each
    offset = layout.offset + before * axis.each * layout.stride[axis.index]
    return replace(layout, shape=tuple(sizes), offset=offset)
