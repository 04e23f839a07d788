"""What passes have to know of an operation: declared by every node, not looked up.

The operations of our own builder have theirs in `operations`; whoever brings nodes of
another framework says for each what it is, and `OPAQUE` of what is not understood.
"""

from dataclasses import dataclass
from typing import Any

__all__ = ["OPAQUE", "PLAIN", "Batch", "NodeTraits"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Along which axes a node can be cut into slices of the batch.

    A slice of the node reads the slices of those inputs that have an axis, and the
    others whole. It writes slices of those results that have an axis; the other results
    are the sums of what the slices compute.

    Attributes:
        inputs: The axis of every input, or None.
        outputs: The axis of every result, or None.
        averaged: Results that are divided by the batch: what a slice of n of N samples
            computes of them has to be multiplied by n / N.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    averaged: tuple[int, ...] = ()


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
        recomputable: Whether it may run again. What mutates may not without a `replay`.
        movable: Whether its results may be elsewhere while no node uses them.
        rereads: Inputs that it reads twice.
        narrow: Its first result, and those of its inputs that are neither parameters nor
            statistics, may be in a narrower type than all else.
        temporaries: Bytes of scratch memory that it takes while it runs.
        batch: How it can be cut along the batch; None if it cannot.
    """

    view: bool = False
    overwrites: tuple[int, ...] = ()
    expensive: bool = False
    convolution: bool = False
    joint: bool = False
    random: bool = False
    replay: tuple[tuple[str, Any], ...] = ()
    recomputable: bool = True
    movable: bool = True
    rereads: tuple[int, ...] = ()
    narrow: bool = False
    temporaries: int = 0
    batch: Batch | None = None


PLAIN = NodeTraits()
"""Of an operation that makes its results of its inputs, and no more can be said."""

OPAQUE = NodeTraits(recomputable=False, movable=False)
"""Of an operation that nothing is known about: its results stay where they are."""
