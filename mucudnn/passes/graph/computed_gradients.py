"""Updates read gradients as they were computed: in that type, and in that layout.

A parameter is cast, or turned, before a product reads it, so its gradient is cast and
turned back. Where only an update would read that, the update reads what was computed:
it knows both, and computes in the parameter's type all the same.
"""

from collections import Counter
from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node
from mucudnn.passes.graph.precision.mixed_precision import LOSS_SCALES

__all__ = ["with_computed_gradients"]


def with_computed_gradients(graph: Graph, *, turned: bool = True) -> Graph:
    """A training graph, without updates, whose gradients are not cast or turned back.

    Args:
        graph: The graph.
        turned: Whether a gradient may be in another layout than its parameter; false
            where it is added to what has the parameter's.
    """
    readers = Counter(name for node in graph.nodes for name in node.inputs)

    def undoes(node: Node) -> bool:
        if node.op == "to_channels_first":
            return turned
        return node.op == "cast" and graph.tensors[node.inputs[0]].dtype in LOSS_SCALES

    found: dict[str, str] = {}
    gone: set[str] = set()
    for w, gradient in graph.gradients.items():
        computed = gradient
        while (node := graph.producers.get(computed)) is not None and undoes(node):
            alone = readers[computed] == int(computed != gradient)
            if not alone or computed in graph.outputs:
                break
            gone.add(computed)
            (computed,) = node.inputs
        found[w] = computed
    tensors = {n: spec for n, spec in graph.tensors.items() if n not in gone}
    return replace(
        graph,
        tensors=MappingProxyType(tensors),
        nodes=tuple(n for n in graph.nodes if gone.isdisjoint(n.outputs)),
        gradients=MappingProxyType({**graph.gradients, **found}),
    )
