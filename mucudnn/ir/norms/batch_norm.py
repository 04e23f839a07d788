"""Batch normalisation in pieces, so that it runs on slices of the batch.

Slices depend on each other through two numbers a channel. Each leaves its count, its
mean and its sum of squares about that mean; they are merged (Chan, Golub and LeVeque,
1983) into the statistics of the batch, by which slices are normalised. In the backward
pass the two sums that a slice's gradient needs of all others are the gradients of gamma
and beta: they are summed first. The merge moves the running statistics and never runs
again, so what is recomputed from its results are the bits of the first time.
"""

import math
from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.strips import HEIGHT
from mucudnn.ir.tensor import TensorSpec
from mucudnn.ir.traits import Batch, NodeTraits, Operands, Piece, Pieces

__all__ = ["PIECES", "batch_norm_grad_pieces", "batch_norm_pieces"]

_VALUES = 3
"""Of a slice and channel: how many numbers, their mean, their squares about it."""


def _cut(
    inputs: int,
    outputs: tuple[int | None, ...],
    *,
    others: int = 0,
    gathered: tuple[int, ...] = (),
    overwrites: tuple[int, ...] = (),
) -> NodeTraits:
    """Cut along the batch and into strips alike: some inputs by rows, others whole."""

    def along(axis: int) -> Batch:
        rows = tuple(None if place is None else axis for place in outputs)
        reads = (*(axis,) * inputs, *(None,) * others)
        return Batch(reads, rows, gathered=gathered)

    return NodeTraits(overwrites=overwrites, batch=along(0), strips=along(HEIGHT))


PIECES = MappingProxyType(
    {
        "batch_norm_sums": _cut(1, (None,), gathered=(0,)),
        "batch_norm_merge": NodeTraits(recomputable=False),
        "batch_norm_apply": _cut(1, (0,), others=4, overwrites=(0,)),
        "batch_norm_grad_sums": _cut(2, (None, None), others=2),
        "batch_norm_grad_apply": _cut(2, (0,), others=5, overwrites=(1,)),
    }
)
"""Operation -> its traits."""


def batch_norm_pieces(whole: Operands) -> Pieces:
    """Statistics of slices, those of the batch, and the normalised slices."""
    x, gamma, beta, running_mean, running_var = (spec.name for spec in whole.inputs)
    y, mean, inv_std = (spec.name for spec in whole.outputs)
    (channels,) = whole.outputs[1].shape
    stats = TensorSpec(f"{whole.name}:stats", (_VALUES, channels), "float64")
    running = running_mean, running_var
    return (stats,), (
        _piece("sums", "batch_norm_sums", (x,), (stats.name,)),
        replace(
            _piece(
                "merge", "batch_norm_merge", (stats.name, *running), (mean, inv_std)
            ),
            attrs=whole.attrs,
            mutates=running,
        ),
        _piece("apply", "batch_norm_apply", (x, gamma, beta, mean, inv_std), (y,)),
    )


def batch_norm_grad_pieces(whole: Operands) -> Pieces:
    """The gradients of gamma and beta, then that of the input by their means."""
    x, dy, gamma, mean, inv_std = (spec.name for spec in whole.inputs)
    dx, dgamma, dbeta = (spec.name for spec in whole.outputs)
    count = math.prod(whole.inputs[0].shape) // math.prod(whole.inputs[2].shape)
    sums = dgamma, dbeta
    apply = "batch_norm_grad_apply"
    return (), (
        _piece("sums", "batch_norm_grad_sums", (x, dy, mean, inv_std), sums),
        replace(
            _piece("apply", apply, (x, dy, gamma, mean, inv_std, *sums), (dx,)),
            attrs=MappingProxyType({"count": count}),
        ),
    )


def _piece(
    name: str, op: str, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> Piece:
    return Piece(name, op, inputs, outputs, MappingProxyType({}), PIECES[op])
