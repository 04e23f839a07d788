"""Cache cast or transposed copies of parameters between steps.

In mixed precision products read parameters in low precision, and channels-last
convolutions read transposed filters. Making these copies in every step costs extra
launches, reads and writes; an update can write the copy along with the parameter. The
copy is then state, which occupies memory at all times.
"""

from collections import Counter
from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node, Role
from mucudnn.ir.initializers import CopyOf
from mucudnn.ir.tensor import TensorSpec

__all__ = ["copies_of_parameters", "with_copies_of_parameters"]


def with_copies_of_parameters(graph: Graph) -> Graph:
    """Return a training graph whose copies of parameters are state.

    Only copies with the dtype and layout of the parameter's gradient, which are those
    that products read, become state; others are made in every step.
    """
    tensors: dict[str, TensorSpec] = dict(graph.tensors)
    copies: dict[str, CopyOf] = {}
    made_of: dict[str, str] = {}  # cast or transposed tensor -> its parameter
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
    remaining = _without(graph, set(copies), set(made_of))
    written = {name for node in remaining for name in node.outputs}
    removed = made_of.keys() - written - copies.keys()
    return replace(
        graph,
        tensors=MappingProxyType(
            {n: s for n, s in tensors.items() if n not in removed}
        ),
        nodes=remaining,
        initializers=MappingProxyType({**graph.initializers, **copies}),
    )


def _form(spec: TensorSpec) -> tuple[str, str]:
    return spec.dtype, spec.layout


def _without(graph: Graph, copies: set[str], made: set[str]) -> tuple[Node, ...]:
    """Return the nodes, without those that only lead to copies."""
    readers = Counter(name for node in graph.nodes for name in node.inputs)
    remaining = []
    for node in reversed(graph.nodes):
        unread = made.issuperset(node.outputs) and not any(
            readers[name] or name in graph.outputs for name in node.outputs
        )
        if unread or not copies.isdisjoint(node.outputs):
            readers.subtract(node.inputs)
        else:
            remaining.append(node)
    return tuple(reversed(remaining))


def copies_of_parameters(graph: Graph) -> dict[str, str]:
    """Return the copy of each parameter that has one in the state."""
    return {
        how.parameter: name
        for name, how in graph.initializers.items()
        if isinstance(how, CopyOf)
    }
