"""Decomposition of a node into simpler nodes."""

from collections.abc import Mapping
from types import MappingProxyType

from mucudnn.ir.graph import Node
from mucudnn.ir.tensor import TensorSpec
from mucudnn.ir.traits import Operands

__all__ = ["pieces_of"]


def pieces_of(
    tensors: Mapping[str, TensorSpec], node: Node
) -> tuple[tuple[TensorSpec, ...], tuple[Node, ...]]:
    """Return a node's intermediate tensors and pieces; both empty if it has none."""
    make = node.traits.pieces
    if make is None:
        return (), ()
    inputs = tuple(tensors[name] for name in node.inputs)
    outputs = tuple(tensors[name] for name in node.outputs)
    between, pieces = make(Operands(node.name, inputs, outputs, node.attrs))
    return between, tuple(
        Node(
            f"{node.name}:{piece.name}",
            piece.op,
            piece.inputs,
            piece.outputs,
            MappingProxyType(dict(piece.attrs)),
            node.phase,
            piece.mutates,
            piece.traits,
        )
        for piece in pieces
    )
