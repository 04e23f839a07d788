"""Batch normalization split into pieces that run on slices of the batch.

Slices depend on each other through two numbers per channel. Each slice computes its
count, its mean and its sum of squares about that mean; these are merged (Chan, Golub
and LeVeque, 1983) into the statistics of the batch, which normalize all slices. In the
backward pass, a slice's gradient needs two sums over all slices, which are the
gradients of gamma and beta: they are summed first. The merge changes the running
statistics and is never run twice; recomputation from its results is bit-identical.
"""

import math
from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.strips import HEIGHT
from mucudnn.ir.tensor import TensorSpec
from mucudnn.ir.traits import Batch, NodeTraits, Operands, Piece, Pieces

__all__ = ["PIECES", "batch_norm_grad_pieces", "batch_norm_pieces"]

_VALUES = 3
"""Statistics per slice and channel: count, mean, sum of squares about the mean."""


def _cuttable(
    inputs: int,
    outputs: tuple[int | None, ...],
    *,
    others: int = 0,
    gathered: tuple[int, ...] = (),
    overwrites: tuple[int, ...] = (),
) -> NodeTraits:
    """Return traits for cutting along the batch and into spatial strips."""

    def along(axis: int) -> Batch:
        rows = tuple(None if place is None else axis for place in outputs)
        reads = (*(axis,) * inputs, *(None,) * others)
        return Batch(reads, rows, gathered=gathered)

    return NodeTraits(overwrites=overwrites, batch=along(0), strips=along(HEIGHT))


PIECES = MappingProxyType(
    {
        "batch_norm_sums": _cuttable(1, (None,), gathered=(0,)),
        "batch_norm_merge": NodeTraits(recomputable=False),
        "batch_norm_apply": _cuttable(1, (0,), others=4, overwrites=(0,)),
        "batch_norm_grad_sums": _cuttable(2, (None, None), others=2),
        "batch_norm_grad_apply": _cuttable(2, (0,), others=5, overwrites=(1,)),
    }
)
"""Operation -> its traits."""


def batch_norm_pieces(whole: Operands) -> Pieces:
    """Return the pieces: slice statistics, their merge, the normalization."""
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
    """Return the pieces: gradients of gamma and beta, then of the input."""
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
