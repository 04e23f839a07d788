"""Group and layer normalization split into pieces that run on strips of images.

Samples are independent, but all rows of a sample depend on each other. Each strip
computes count, mean and sum of squares about the mean of every group; they are merged
like the slices of a batch normalization. In the backward pass, a strip needs two sums
per group over all strips: of the weighted gradient, and of its products with the
deviations.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from mucudnn.ir.strips import HEIGHT
from mucudnn.ir.tensor import TensorSpec
from mucudnn.ir.traits import Batch, NodeTraits, Operands, Piece, Pieces

__all__ = ["GROUP_PIECES", "group_norm_grad_pieces", "group_norm_pieces"]

_VALUES = 3
"""Statistics per strip and group: count, mean, sum of squares about the mean."""

_SUMS = 2
"""Sums per strip and group: weighted gradients, their products with deviations."""

Attributes = Mapping[str, Any]
Specs = Sequence[TensorSpec]


def _gamma_axis(attrs: Attributes) -> int | None:
    """Return the axis of image rows in gamma, which has no batch axis, or None."""
    return HEIGHT - 1 if attrs["per_element"] else None


def _apply(inputs: Specs, outputs: Specs, attrs: Attributes) -> NodeTraits:
    gamma = _gamma_axis(attrs)
    strips = Batch((HEIGHT, gamma, gamma, None, None), (HEIGHT,))
    return NodeTraits(overwrites=(0,), strips=strips)


def _grad_sums(inputs: Specs, outputs: Specs, attrs: Attributes) -> NodeTraits:
    gamma = _gamma_axis(attrs)
    reads = HEIGHT, HEIGHT, gamma, None, None
    return NodeTraits(strips=Batch(reads, (gamma, gamma, None)))


def _grad_apply(inputs: Specs, outputs: Specs, attrs: Attributes) -> NodeTraits:
    reads = HEIGHT, HEIGHT, _gamma_axis(attrs), None, None, None
    return NodeTraits(overwrites=(1,), strips=Batch(reads, (HEIGHT,)))


_MOMENTS = NodeTraits(strips=Batch((HEIGHT,), (None,), gathered=(0,)))
_MERGE = NodeTraits(recomputable=False)

GROUP_PIECES: Mapping[
    str, NodeTraits | Callable[[Specs, Specs, Attributes], NodeTraits]
] = MappingProxyType(
    {
        "group_norm_sums": _MOMENTS,
        "group_norm_merge": _MERGE,
        "group_norm_apply": _apply,
        "group_norm_grad_sums": _grad_sums,
        "group_norm_grad_apply": _grad_apply,
    }
)
"""Operation -> its traits, or a function that returns them."""


def group_norm_pieces(whole: Operands) -> Pieces:
    """Return the pieces: strip statistics, their merge, the normalization."""
    x, gamma, beta = (spec.name for spec in whole.inputs)
    y, mean, inv_std = (spec.name for spec in whole.outputs)
    groups = whole.outputs[1].shape
    stats = TensorSpec(f"{whole.name}:stats", (_VALUES, *groups), "float64")
    piece = partial(_piece, whole, whole.attrs)
    return (stats,), (
        piece("sums", "group_norm_sums", (x,), (stats.name,)),
        piece("merge", "group_norm_merge", (stats.name,), (mean, inv_std)),
        piece("apply", "group_norm_apply", (x, gamma, beta, mean, inv_std), (y,)),
    )


def group_norm_grad_pieces(whole: Operands) -> Pieces:
    """Return the pieces: gradients of gamma and beta, then of the input."""
    x, dy, gamma, mean, inv_std = (spec.name for spec in whole.inputs)
    dx, dgamma, dbeta = (spec.name for spec in whole.outputs)
    groups, dtype = whole.inputs[3].shape, whole.inputs[3].dtype
    totals = TensorSpec(f"{whole.name}:totals", (_SUMS, *groups), dtype)
    count = math.prod(whole.inputs[0].shape[1:]) // whole.attrs["groups"]
    piece = partial(_piece, whole, {**whole.attrs, "count": count})
    reads, sums = (x, dy, gamma, mean, inv_std), (dgamma, dbeta, totals.name)
    apply = "group_norm_grad_apply"
    return (totals,), (
        piece("sums", "group_norm_grad_sums", reads, sums),
        piece("apply", apply, (*reads, totals.name), (dx,)),
    )


def _piece(
    whole: Operands,
    attrs: Attributes,
    name: str,
    op: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
) -> Piece:
    traits = GROUP_PIECES[op]
    if not isinstance(traits, NodeTraits):
        traits = traits(whole.inputs, whole.outputs, attrs)
    return Piece(name, op, inputs, outputs, MappingProxyType(dict(attrs)), traits)
