"""Copies of parameters as products read them, kept from step to step by their updates.

In mixed precision a product reads a parameter in the narrow type, and a convolution
with channels last reads a filter so. Cast and turned in every step it is read and
written once or twice more, by launches of their own; an update has it at hand, and
writes it beside. The copy is state then: memory that is taken all the time.
"""

from collections import Counter
from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node, Role
from mucudnn.ir.initializers import CopyOf
from mucudnn.ir.tensor import TensorSpec

__all__ = ["copies_of_parameters", "with_copies_of_parameters"]


def with_copies_of_parameters(graph: Graph) -> Graph:
    """A training graph whose copies of parameters are state, for updates to change.

    Those that have the type and the layout of the parameter's gradient, which are those
    of the products; others are cast and turned as before.

    Args:
        graph: Before it gets updates; see `with_computed_gradients`.
    """
    tensors: dict[str, TensorSpec] = dict(graph.tensors)
    copies: dict[str, CopyOf] = {}
    made_of: dict[str, str] = {}  # what is made of a parameter -> the parameter
    for node in graph.nodes:
        if node.op not in ("cast", "to_channels_last"):
            continue
        (source,), (copy,) = node.inputs, node.outputs
        w = made_of.get(source, source)
        if w not in graph.gradients:
            continue
        made_of[copy] = w
        own, computed = (_form(tensors[name]) for name in (w, graph.gradients[w]))
        if own != _form(tensors[copy]) == computed and copy not in graph.outputs:
            tensors[copy] = replace(tensors[copy], role=Role.STATE)
            copies[copy] = CopyOf(w)
    left = _without(graph, set(copies), set(made_of))
    written = {name for node in left for name in node.outputs}
    gone = made_of.keys() - written - copies.keys()
    return replace(
        graph,
        tensors=MappingProxyType({n: s for n, s in tensors.items() if n not in gone}),
        nodes=left,
        initializers=MappingProxyType({**graph.initializers, **copies}),
    )


def _form(spec: TensorSpec) -> tuple[str, str]:
    return spec.dtype, spec.layout


def _without(graph: Graph, copies: set[str], made: set[str]) -> tuple[Node, ...]:
    """The nodes, without those that make copies, or what only they read."""
    readers = Counter(name for node in graph.nodes for name in node.inputs)
    left = []
    for node in reversed(graph.nodes):
        unread = made.issuperset(node.outputs) and not any(
            readers[name] or name in graph.outputs for name in node.outputs
        )
        if unread or not copies.isdisjoint(node.outputs):
            readers.subtract(node.inputs)
        else:
            left.append(node)
    return tuple(reversed(left))


def copies_of_parameters(graph: Graph) -> dict[str, str]:
    """Parameter -> its copy, where it has one that is state."""
    return {
        how.parameter: name
        for name, how in graph.initializers.items()
        if isinstance(how, CopyOf)
    }
