"""Node traits that passes read: batch rows, windows, slices, recomputation.

Built-in operations have theirs in `operations`. Integrations of other frameworks
declare traits for each node, and `OPAQUE` for nodes they do not understand.
"""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mucudnn.ir.tensor import TensorSpec

if TYPE_CHECKING:
    from mucudnn.ir.graph import Node


@dataclass(frozen=True, slots=True)
class Rows:
    """Part of an axis, such as samples of a batch: `start` to `stop` of `total`."""

    start: int
    stop: int
    total: int

    @property
    def interval(self) -> tuple[int, int]:
        """First position and end (exclusive)."""
        return self.start, self.stop

    def of(self, size: int) -> "Rows":
        """Return the same part of an axis of another size."""
        start, stop = self.start * size // self.total, self.stop * size // self.total
        return Rows(start, stop, size)

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.stop - self.start


SliceRule = Callable[[Mapping[str, Any], Sequence[TensorSpec], Rows], Mapping[str, Any]]
"""Function from a node's attributes, inputs and rows to the attributes of a slice."""

Interval = tuple[int, int]
"""Positions along an axis: first and end (exclusive)."""


@dataclass(frozen=True, slots=True)
class Strip:
    """The computation of some rows of a node's results.

    Attributes:
        inputs: Rows that it reads of every input, or None for all. Rows outside of the
            input are zeros.
        made: Rows of the results that it computes: those requested, and perhaps some
            around them with wrong values. None if the results are sums.
        attrs: Attributes of the computation.
    """

    inputs: "tuple[Interval | None, ...]"
    made: "Interval | None"
    attrs: Mapping[str, Any]


Reach = Callable[["Operands", Rows], Strip]
"""Function from a node's operands and rows of its results to their computation."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The axes along which a node can be cut into slices of the batch or its images.

    A slice of the node reads slices of the inputs that have an axis, and all of the
    others. It writes slices of the results that have an axis; the other results are
    sums over all slices.

    Attributes:
        inputs: Axis of every input, or None.
        outputs: Axis of every result, or None.
        averaged: Results that are means over the batch: the value from a slice of n of
            N samples has to be multiplied by n / N, unless `sliced` accounts for it.
        gathered: Results that are not sums: every slice has its own, of the same shape,
            and readers of the result read those of all slices.
        accumulates: Whether its single result, a sum, may be added to existing values,
            which are then one more input that shares the result's storage.
        sliced: Attributes of a slice, if they differ from those of the node.
        reach: Computation of a slice that reads other rows of its inputs than it
            writes; replaces `sliced`.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    averaged: tuple[int, ...] = ()
    gathered: tuple[int, ...] = ()
    accumulates: bool = False
    sliced: SliceRule | None = None
    reach: Reach | None = None


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of a node that is split into pieces or strips."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attrs: Mapping[str, Any]


Pieces = tuple[tuple[TensorSpec, ...], tuple["Node", ...]]
"""Tensors between the pieces of a node, and its pieces in order.

A piece is a node whose name is appended to that of the node that it is part of."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The operation that recomputes a node's first result from its other results.

    Attributes:
        op: Operation, bit-identical to the node's.
        inputs: Indices of its inputs in the node's inputs followed by its results.
        traits: Its own traits.
    """

    op: str
    inputs: tuple[int, ...]
    traits: "NodeTraits"


class Collective(enum.Enum):
    """Direction of an exchange between ranks."""

    GATHER = "gather"
    """Every rank receives what is distributed over all of them."""

    REDUCE = "reduce"
    """What every rank has is combined, and distributed again or not."""


@dataclass(frozen=True, slots=True)
class NodeTraits:
    """Properties of a node that matter for memory and order.

    Attributes:
        view: It touches no bytes: its results share the storage of an input, given by
            their `alias`, which is any tensor of the same storage.
        overwrites: Inputs of equal shape and type that its first result may overwrite,
            the preferred one first.
        expensive: Recomputation costs more than keeping the results.
        convolution: It is a convolution or one of its gradients.
        joins_branches: It joins branches; other systems never recompute its results.
        random: It draws random numbers, which are a function of a generator's state, or
            of its attributes and each element's position. Copies and slices have to
            draw the same numbers.
        replay: Attributes that replace the node's own in a copy, so that the copy does
            not change mutated inputs a second time.
        recompute_as: Operation that runs instead of a copy; only the first result can
            be recomputed then.
        recomputable: Whether it may run twice. A node that mutates inputs also needs
            `replay` or `recompute_as`.
        movable: Whether its results may be offloaded between their uses.
        collective: How it exchanges data with other ranks, which run it at the same
            place of their order; it runs beside computation until its result is read.
        reads_twice: Inputs that it reads twice.
        narrow: Its first result, and inputs that are neither parameters nor statistics,
            may have a narrower type than all other operands.
        reads_narrow: Its first input may have a narrower type, but no result.
        temporaries: Bytes of scratch memory while it runs.
        batch: How it can be cut along the batch; None if it cannot.
        strips: How it can be cut along the first axis of its images, their height or,
            in three dimensions, their depth; None if it cannot.
        decomposition: Split of a node whose samples depend on each other into nodes of
            which all but a few small ones can be cut.
    """

    view: bool = False
    overwrites: tuple[int, ...] = ()
    expensive: bool = False
    convolution: bool = False
    joins_branches: bool = False
    random: bool = False
    replay: tuple[tuple[str, Any], ...] = ()
    recompute_as: Recomputation | None = None
    recomputable: bool = True
    movable: bool = True
    collective: Collective | None = None
    reads_twice: tuple[int, ...] = ()
    narrow: bool = False
    reads_narrow: bool = False
    temporaries: int = 0
    batch: Batch | None = None
    strips: Batch | None = None
    decomposition: Callable[[Operands], Pieces] | None = None


PLAIN = NodeTraits()
"""Traits of an operation that computes its results from its inputs only."""

OPAQUE = NodeTraits(recomputable=False, movable=False)
"""Traits of an unknown operation: its results are neither recomputed nor offloaded."""


# Row dependencies of windows that slide along one axis of an image.
#
# Convolutions, pools and their gradients have them. `x` is the image below the windows,
# `y` has one row per window.


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding windows along an axis.

    Attributes:
        kernel: Rows of a window.
        stride: Rows from one window to the next.
        padding: Rows of padding above the image.
        dilation: Rows from one row of a window to its next.
    """

    kernel: int
    stride: int
    padding: int
    dilation: int = 1

    @property
    def span(self) -> int:
        """Rows from a window's first row to the end of its last."""
        return self.dilation * (self.kernel - 1) + 1

    def under(self, y: Rows) -> Interval:
        """Return the rows of x below some windows; rows outside of x are padding."""
        start = y.start * self.stride - self.padding
        return start, start + (y.count - 1) * self.stride + self.span

    def padded_for(self, x: Rows) -> tuple[Interval, int]:
        """Return the windows that contain some rows of x, and the strip's padding."""
        # Padding: rows by which the first window begins above the strip, the least for
        # which all windows with one of its rows are covered at both ends. Windows
        # beyond the image may be among them.
        step, reach = self.stride, self.span - 1
        place = x.start + self.padding
        padding = max(0, reach - step + 1)
        padding += (place - padding) % step
        last = (x.stop - 1 + self.padding) // step
        while True:
            first = (place - padding) // step
            count = (x.count + 2 * padding - reach - 1) // step + 1
            if count > 0 and first + count > last:
                return (first, first + count), padding
            padding += step

    def holding(self, x: Rows, windows: int) -> Interval:
        """Return the windows (of `windows`) that contain rows of x, at least one.

        The first begins at or above the first of those rows.
        """
        holding = -(-(x.start + self.padding - self.span + 1) // self.stride)
        first = min(holding, (x.start + self.padding) // self.stride)
        # At least one window, as there are no empty strips.
        first = min(max(first, 0), windows - 1)
        past = min(windows, (x.stop - 1 + self.padding) // self.stride + 1)
        return first, max(first + 1, past)


Attributes = Mapping[str, Any]

Inputs = Sequence[TensorSpec]


def conv_rows(attrs: Attributes, inputs: Inputs, rows: Rows) -> Attributes:
    """Return attributes of the same convolution with fewer samples."""
    return {**attrs, "problem": attrs["problem"].with_batch(rows.count)}


def box_rows(attrs: Attributes, inputs: Inputs, rows: Rows) -> Attributes:
    """Return attributes of a box that is cut out of fewer samples."""
    return {**attrs, "stops": (rows.count, *attrs["stops"][1:])}


def drawn_rows(attrs: Attributes, inputs: Inputs, rows: Rows) -> Attributes:
    """Shift the random offset to the slice's position in the whole tensor."""
    before = rows.start * math.prod(inputs[0].shape[1:])
    return {**attrs, "offset": attrs.get("offset", 0) + before}


def counted(index: int, attrs: Attributes, inputs: Inputs, rows: Rows) -> Attributes:
    """Keep the element count of the whole input, so that partial means add up."""
    return {"count": math.prod(inputs[index].shape), **attrs}
