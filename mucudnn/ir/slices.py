"""Attributes of nodes that compute a slice of the batch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mucudnn.ir.tensor import TensorSpec
from mucudnn.ir.traits import Rows

__all__ = ["box_rows", "conv_rows", "counted", "drawn_rows"]

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
