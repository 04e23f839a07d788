"""Narrow copies of parameters, kept from step to step by what updates them.

In mixed precision a product reads a parameter in the narrow type. Cast in every step it
is read wide and written narrow once more, by a launch of its own; an update has it at
hand, and writes it beside. The copy is state then: memory that is taken all the time.
"""

from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Role
from mucudnn.ir.initializers import CopyOf
from mucudnn.ir.tensor import TensorSpec
from mucudnn.passes.graph.precision.mixed_precision import LOSS_SCALES

__all__ = ["copies_of_parameters", "with_narrow_copies"]


def with_narrow_copies(graph: Graph) -> Graph:
    """A training graph whose narrow copies are state, for updates to change.

    Those of parameters whose gradients, too, are narrow; others are cast as before.

    Args:
        graph: Before it gets updates; see `with_narrow_gradients`.
    """
    tensors: dict[str, TensorSpec] = dict(graph.tensors)
    copies: dict[str, CopyOf] = {}
    for node in graph.nodes:
        if node.op != "cast" or node.inputs[0] not in graph.gradients:
            continue
        (w,), (copy,) = node.inputs, node.outputs
        kind = tensors[copy].dtype
        narrow = kind in LOSS_SCALES and kind != tensors[w].dtype
        same = tensors[graph.gradients[w]].dtype == kind
        if narrow and same and copy not in graph.outputs:
            tensors[copy] = replace(tensors[copy], role=Role.STATE)
            copies[copy] = CopyOf(w)
    return replace(
        graph,
        tensors=MappingProxyType(tensors),
        nodes=tuple(n for n in graph.nodes if copies.keys().isdisjoint(n.outputs)),
        initializers=MappingProxyType({**graph.initializers, **copies}),
    )


def copies_of_parameters(graph: Graph) -> dict[str, str]:
    """Parameter -> its narrow copy, where it has one that is state."""
    return {
        how.parameter: name
        for name, how in graph.initializers.items()
        if isinstance(how, CopyOf)
    }
