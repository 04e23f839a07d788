"""Batch normalization fused with a sum and a ReLU, and its pieces.

A fused node is cut along the batch like the nodes it replaces: the pieces of the
normalization, then the sum and the ReLU. The gradient of the variant without a sum
reads no result: it recomputes the ReLU's mask from the input with the formula of the
forward pass, bit for bit.
"""

from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.norms.batch_norm import (
    PIECES,
    batch_norm_grad_pieces,
    batch_norm_pieces,
)
from mucudnn.ir.strips import HEIGHT
from mucudnn.ir.tensor import TensorSpec
from mucudnn.ir.traits import Batch, NodeTraits, Operands, Piece, Pieces

__all__ = ["FUSED_NORMS"]

_STRIPS_OF_ONE = Batch((HEIGHT,), (HEIGHT,))
_STRIPS_OF_TWO = Batch((HEIGHT, HEIGHT), (HEIGHT,))
_RELU = NodeTraits(
    overwrites=(0,), narrow=True, batch=Batch((0,), (0,)), strips=_STRIPS_OF_ONE
)
_ADD = NodeTraits(
    overwrites=(0, 1), joint=True, batch=Batch((0, 0), (0,)), strips=_STRIPS_OF_TWO
)
_RELU_GRAD = NodeTraits(
    overwrites=(1,), batch=Batch((0, 0), (0,)), strips=_STRIPS_OF_TWO
)


def _forward(whole: Operands) -> Pieces:
    """Return the normalization's pieces, a sum for each term, and a ReLU."""
    y, mean, inv_std = whole.outputs
    own, terms = whole.inputs[:5], whole.inputs[5:]
    normed = _like(y, f"{whole.name}:normed")
    norm = replace(whole, inputs=own, outputs=(normed, mean, inv_std))
    between, pieces = batch_norm_pieces(norm)
    between = (*between, normed)
    for term in terms:
        total = _like(y, f"{whole.name}:sum")
        added = _piece("add", "add", (normed.name, term.name), (total.name,), _ADD)
        between, pieces, normed = (*between, total), (*pieces, added), total
    relu = _piece("relu", "relu", (normed.name,), (y.name,), _RELU)
    return between, (*pieces, relu)


def _backward(whole: Operands) -> Pieces:
    """Return pieces: recomputed ReLU result, its gradient, the normalization's."""
    x, dy, gamma, beta, mean, inv_std = whole.inputs
    normed, y, masked = (
        _like(dy, f"{whole.name}:{what}") for what in ("normed", "y", "masked")
    )
    again = tuple(spec.name for spec in (x, gamma, beta, mean, inv_std))
    apply = "batch_norm_apply"
    norm = replace(whole, inputs=(x, masked, gamma, mean, inv_std))
    between, pieces = batch_norm_grad_pieces(norm)
    return (normed, y, masked, *between), (
        _piece("again", apply, again, (normed.name,), PIECES[apply]),
        _piece("relu", "relu", (normed.name,), (y.name,), _RELU),
        _masking(y, dy, masked),
        *pieces,
    )


def _backward_of_sum(whole: Operands) -> Pieces:
    """Return pieces: the ReLU's gradient (also the term's), the normalization's."""
    x, dy, y, gamma, mean, inv_std = whole.inputs
    masked, *others = whole.outputs
    norm = replace(
        whole, inputs=(x, masked, gamma, mean, inv_std), outputs=tuple(others)
    )
    between, pieces = batch_norm_grad_pieces(norm)
    return between, (_masking(y, dy, masked), *pieces)


def _masking(y: TensorSpec, dy: TensorSpec, masked: TensorSpec) -> Piece:
    inputs = y.name, dy.name
    return _piece("mask", "relu_grad", inputs, (masked.name,), _RELU_GRAD)


def _like(spec: TensorSpec, name: str) -> TensorSpec:
    return replace(spec, name=name, alias=None, offset=0)


def _piece(
    name: str,
    op: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    traits: NodeTraits,
) -> Piece:
    return Piece(name, op, inputs, outputs, MappingProxyType({}), traits)


_FORWARD = NodeTraits(
    replay=(("update", False),), narrow=True, rereads=(0,), pieces=_forward
)

FUSED_NORMS = MappingProxyType(
    {
        "batch_norm_relu": _FORWARD,
        "batch_norm_relu_grad": NodeTraits(
            overwrites=(1,), rereads=(0, 1), pieces=_backward
        ),
        "batch_norm_add_relu": replace(_FORWARD, joint=True),
        "batch_norm_add_relu_grad": NodeTraits(
            overwrites=(1,), rereads=(0,), pieces=_backward_of_sum
        ),
    }
)
"""Operation -> its traits."""
