"""The split axis of a tensor, how a call is cut along it, and the layout of rows.

The split axis is the batch or the height of images. A row is what is cut: one sample,
or one row of an image.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mucudnn.ir.traits import Interval, Rows
from mucudnn.torch.lowering.lowered import Call, Layout, Operand


@dataclass(frozen=True, slots=True)
class Axis:
    """The split axis of a tensor.

    Attributes:
        index: Index of the axis.
        each: Entries along it that belong to one row.
    """

    index: int
    each: int = 1

    def fits(self, layout: Layout, batch: int) -> bool:
        """Return whether a tensor has `batch` rows along this axis."""
        rank = len(layout.shape)
        return self.index < rank and layout.shape[self.index] == self.each * batch


@dataclass(frozen=True, slots=True)
class StripCall:
    """A call that computes some rows of another call's results.

    Attributes:
        reads: Operand -> the rows that are read; rows outside of it are zeros.
        made: The rows of the results that are computed; None for sums over rows.
    """

    reads: Mapping[int, Interval]
    made: Interval | None
    call: Call


Stripped = Callable[[Rows], StripCall]
"""Returns the call of a strip, which is given as a share of another number of rows."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Division of a call into calls over row ranges.

    Attributes:
        inputs: Split axis of each operand of which a slice reads its rows only; it
            reads all of any other operand.
        outputs: Split axis of each result; None for a sum over the slices.
        shaped: Positions of arguments that are the shape of the first result.
        counted: Positions of arguments that are the number of rows.
        averaged: Whether the whole call divides by the number of rows: the result of a
            slice of n of N rows has to be multiplied by n / N.
        gathered: Whether results without a split axis are not sums: their readers take
            those of all slices as their last operand.
        stripped: Returns the call of a strip that reads other rows than it computes;
            replaces `shaped`, `counted` and `averaged`.
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
    """A call in a graph, with the split axes of its operands.

    Attributes:
        results: Position of each output in the returned value.
        axes: Split axis of each operand; None if it has none.
        batch: Number of rows; of images, of the first operand that has a split axis.
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
        """Return the argument at a position, or its default."""
        return self.args[position] if position < len(self.args) else default

    def operand(self, position: int) -> int | None:
        """Return the index of the operand that an argument is; None if it is none."""
        found = self.arg(position)
        return found.index if isinstance(found, Operand) else None

    def axis(self, position: int) -> Axis | None:
        """Return the split axis of an argument; None if it has none."""
        index = self.operand(position)
        return None if index is None else self.axes[index]

    def shape(self, position: int) -> tuple[int, ...]:
        """Return the shape of an argument; empty if it is no operand."""
        index = self.operand(position)
        return () if index is None else self.inputs[index].shape

    def at(self, axes: Mapping[int, Axis]) -> dict[int, Axis]:
        """Map positions of arguments to indices of operands, if they are operands."""
        return {
            index: axis
            for position, axis in axes.items()
            if (index := self.operand(position)) is not None
        }


Rule = Callable[[Site], Cut | None]
"""Returns how a call is cut; None if slices are not known to compute the same."""


def rows_in(layout: Layout, axis: Axis, nbytes: int) -> tuple[int, int, int] | None:
    """Find the rows along an axis as runs of a storage with `nbytes` bytes.

    A run is a part of the storage in which all rows follow each other: one for the
    whole storage if the axis is the outermost, one for each channel of NCHW images.

    Returns:
        Number of runs, rows in each, and bytes of a row in each; None if the storage
        does not consist of such runs.
    """
    if axis.index >= len(layout.shape) or 0 in layout.shape:
        return None
    rows, rest = divmod(layout.shape[axis.index], axis.each)
    row = layout.stride[axis.index] * axis.each
    run, item = rows * row, layout.dtype.itemsize
    if rest or not run or not nbytes or nbytes % (run * item):
        return None
    sizes = list(layout.shape)
    sizes[axis.index] = axis.each
    # Within a run, the numbers of a row must end before the next row begins.
    within = (
        (size - 1) * stride
        for size, stride in zip(sizes, layout.stride, strict=True)
        if stride % run
    )
    if layout.offset % run + sum(within) >= row:
        return None
    return nbytes // (run * item), rows, row * item


def layout_of_rows(layout: Layout, axis: Axis, count: int, before: int = 0) -> Layout:
    """Return the layout of `count` rows of a tensor behind `before` others.

    The storage has these rows only: each of its runs is shorter in proportion.
    """
    row = layout.stride[axis.index] * axis.each
    run, mine = layout.shape[axis.index] // axis.each * row, count * row
    sizes = list(layout.shape)
    sizes[axis.index] = count * axis.each
    strides = [
        step // run * mine if size > 1 and step % run == 0 else step
        for size, step in zip(layout.shape, layout.stride, strict=True)
    ]
    strides[axis.index] = layout.stride[axis.index]
    runs, within = divmod(layout.offset, run)
    offset = runs * mine + within + before * row
    return replace(layout, shape=tuple(sizes), stride=tuple(strides), offset=offset)
