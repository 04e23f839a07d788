"""What passes have to know of an operation: declared by every node, not looked up.

The operations of our own builder have theirs in `operations`; whoever brings nodes of
another framework says for each what it is, and `OPAQUE` of what is not understood.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.ir.tensor import TensorSpec

__all__ = [
    "OPAQUE",
    "PLAIN",
    "Again",
    "Batch",
    "Interval",
    "NodeTraits",
    "Operands",
    "Piece",
    "Pieces",
    "Reach",
    "Rows",
    "SliceRule",
    "Strip",
]


@dataclass(frozen=True, slots=True)
class Rows:
    """A part of an axis, such as samples of a batch: `start` to `stop` of `total`."""

    start: int
    stop: int
    total: int

    @property
    def interval(self) -> tuple[int, int]:
        """The first, and the one behind the last."""
        return self.start, self.stop

    def of(self, size: int) -> "Rows":
        """The same part of an axis of another size."""
        start, stop = self.start * size // self.total, self.stop * size // self.total
        return Rows(start, stop, size)

    @property
    def count(self) -> int:
        """How many."""
        return self.stop - self.start


SliceRule = Callable[[Mapping[str, Any], Sequence[TensorSpec], Rows], Mapping[str, Any]]
"""Attributes of a slice from those of the whole node, its inputs and the rows."""


Interval = tuple[int, int]
"""Positions along an axis: the first, and the one behind the last."""


@dataclass(frozen=True, slots=True)
class Strip:
    """What a node does to compute some rows of its results.

    Attributes:
        inputs: The rows of every input that it reads, or None for all. Those outside of
            the input are zeros.
        made: The rows of its results that it computes: those asked for, and perhaps
            some around them that come out wrong. None where its results are sums.
        attrs: Its attributes.
    """

    inputs: "tuple[Interval | None, ...]"
    made: "Interval | None"
    attrs: Mapping[str, Any]


Reach = Callable[["Operands", Rows], Strip]
"""What a node does for some rows of its results."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Along which axes a node can be cut into slices, of the batch or of its images.

    A slice of the node reads the slices of those inputs that have an axis, and the
    others whole. It writes slices of those results that have an axis; the other results
    are the sums of what the slices compute.

    Attributes:
        inputs: The axis of every input, or None.
        outputs: The axis of every result, or None.
        averaged: Results that are divided by the batch: what a slice of n of N samples
            computes of them has to be multiplied by n / N, unless `sliced` sees to it.
        gathered: Results that are no sums: every slice has one of its own, of the same
            shape, and who reads the result reads those of all slices in its place.
        accumulates: Whether its one result, a sum, may be added to what is there: that
            is then one more input, whose bytes the result has.
        sliced: Attributes of a slice, where they are not those of the node.
        reach: What a slice does, where it reads more than the same rows of each input;
            it stands in for `sliced`.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    averaged: tuple[int, ...] = ()
    gathered: tuple[int, ...] = ()
    accumulates: bool = False
    sliced: SliceRule | None = None
    reach: Reach | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """One of the nodes that a node falls into.

    Attributes:
        name: What is appended to the node's.
        op: Its operation.
        inputs: What it reads.
        outputs: What it writes.
        attrs: What else its kernel needs.
        traits: What it is.
        mutates: Those of its inputs that it overwrites.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]
    traits: "NodeTraits"
    mutates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Operands:
    """What a node that falls into pieces works on.

    Attributes:
        name: The node's.
        inputs: What it reads.
        outputs: What it writes.
        attrs: Its attributes.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attrs: Mapping[str, Any]


Pieces = tuple[tuple[TensorSpec, ...], tuple[Piece, ...]]
"""Tensors between the pieces of a node, and the pieces in order."""


@dataclass(frozen=True, slots=True)
class Again:
    """What makes a node's first result once more while its other results are there.

    Attributes:
        op: Its operation, which writes the bits that the node wrote.
        inputs: What it reads, of the node's inputs and results in a row.
        traits: What it is.
    """

    op: str
    inputs: tuple[int, ...]
    traits: "NodeTraits"


@dataclass(frozen=True, slots=True)
class NodeTraits:
    """What a node is, as far as memory and order are concerned.

    Attributes:
        view: It touches no bytes: its results are names for those of an input. Which
            input follows from their `alias`, any tensor of the same storage.
        overwrites: Inputs that its first result may overwrite where they have its shape
            and type, the preferred one first.
        expensive: Its results are worth more than their bytes.
        convolution: It is a convolution or one of its gradients.
        joint: It joins branches; other systems never compute its results again.
        random: It draws random numbers, which follow from a generator's state or from
            its attributes and each element's position: a copy of it has to draw the
            same, and so has a slice.
        replay: Attributes of a copy in place of the node's own, which keep it from
            changing what the node mutates a second time.
        again: What runs in place of a copy; the results but the first never run again.
        recomputable: Whether it may run again. What mutates may not without one of
            `replay` and `again`.
        movable: Whether its results may be elsewhere while no node uses them.
        rereads: Inputs that it reads twice.
        narrow: Its first result, and inputs that are neither parameters nor statistics,
            may be in a narrower type than all else.
        reads_narrow: Its first input may be, and no result.
        temporaries: Bytes of scratch memory that it takes while it runs.
        batch: How it can be cut along the batch; None if it cannot.
        strips: How it can be cut along the first axis of its images, their height or,
            in three dimensions, their depth; None if it cannot.
        pieces: What a node whose samples depend on each other falls into: nodes of
            which all but a few small ones can be cut.
    """

    view: bool = False
    overwrites: tuple[int, ...] = ()
    expensive: bool = False
    convolution: bool = False
    joint: bool = False
    random: bool = False
    replay: tuple[tuple[str, Any], ...] = ()
    again: Again | None = None
    recomputable: bool = True
    movable: bool = True
    rereads: tuple[int, ...] = ()
    narrow: bool = False
    reads_narrow: bool = False
    temporaries: int = 0
    batch: Batch | None = None
    strips: Batch | None = None
    pieces: Callable[[Operands], Pieces] | None = None


PLAIN = NodeTraits()
"""Of an operation that makes its results of its inputs, and no more can be said."""

OPAQUE = NodeTraits(recomputable=False, movable=False)
"""Of an operation that nothing is known about: its results stay where they are."""
