"""Where the batch, or the height, is in a tensor, and how its rows lie in a storage."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mucudnn.ir.traits import Interval, Rows
from mucudnn.torch.lowering.lowered import Call, Layout, Operand


@dataclass(frozen=True, slots=True)
class Axis:
    """The axis of a tensor along which samples, or rows of images, follow each other.

    Attributes:
        index: Which axis.
        each: Entries along it that belong to one of them.
    """

    index: int
    each: int = 1

    def fits(self, layout: Layout, batch: int) -> bool:
        """Whether a tensor has so many samples along it."""
        rank = len(layout.shape)
        return self.index < rank and layout.shape[self.index] == self.each * batch


@dataclass(frozen=True, slots=True)
class StripCall:
    """What computes some rows of a call's results.

    Attributes:
        reads: Operand -> the rows of it that are read; those outside of it are zeros.
        made: The rows of the results that are computed; None where they are sums.
        call: What is called.
    """

    reads: Mapping[int, Interval]
    made: Interval | None
    call: Call


Stripped = Callable[[Rows], StripCall]
"""What computes a strip, which is a part of rows of another number."""


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
        gathered: Whether results are no sums: who reads one is given those of all
            slices, as the last of its operands.
        stripped: What computes a strip, where it reads other rows than it computes; it
            stands in for `shaped`, `counted` and `averaged`.
    """

    inputs: Mapping[int, Axis]
    outputs: tuple[Axis | None, ...]
    shaped: tuple[int, ...] = ()
    counted: tuple[int, ...] = ()
    averaged: bool = False
    gathered: bool = False
    stripped: Stripped | None = None


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
        batch: Samples; or rows of images, of the first operand that is known to have
            some.
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


def rows_in(layout: Layout, axis: Axis, nbytes: int) -> tuple[int, int, int] | None:
    """How the rows along an axis lie in a storage of so many bytes.

    Returns:
        How many stretches there are of rows behind each other, rows in each, and bytes
        of one in each; None if they are not such stretches.
    """
    if axis.index >= len(layout.shape) or 0 in layout.shape:
        return None
    rows, rest = divmod(layout.shape[axis.index], axis.each)
    row = layout.stride[axis.index] * axis.each
    stretch, item = rows * row, layout.dtype.itemsize
    if rest or not stretch or not nbytes or nbytes % (stretch * item):
        return None
    sizes = list(layout.shape)
    sizes[axis.index] = axis.each
    within = (
        (size - 1) * stride
        for size, stride in zip(sizes, layout.stride, strict=True)
        if stride % stretch
    )
    if layout.offset % stretch + sum(within) >= row:
        return None
    return nbytes // (stretch * item), rows, row * item


def of_rows(layout: Layout, axis: Axis, count: int, before: int = 0) -> Layout:
    """How some rows of a tensor lie, in a storage with so many others before.

    Where rows are in several stretches, those of the storage are as much shorter.
    """
    row = layout.stride[axis.index] * axis.each
    stretch, mine = layout.shape[axis.index] // axis.each * row, count * row
    sizes = list(layout.shape)
    sizes[axis.index] = count * axis.each
    strides = [
        step // stretch * mine if size > 1 and step % stretch == 0 else step
        for size, step in zip(layout.shape, layout.stride, strict=True)
    ]
    strides[axis.index] = layout.stride[axis.index]
    stretches, within = divmod(layout.offset, stretch)
    offset = stretches * mine + within + before * row
    return replace(layout, shape=tuple(sizes), stride=tuple(strides), offset=offset)
