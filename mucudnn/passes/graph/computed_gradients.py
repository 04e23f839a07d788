"""Let updates read gradients in the dtype and layout in which they were computed.

A parameter is cast or transposed before a product reads it, so its gradient is cast or
transposed back. Where only an update would read the result, the update reads the
computed gradient instead; it still computes in the parameter's dtype.
"""

from collections import Counter
from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node
from mucudnn.passes.graph.precision.mixed_precision import LOSS_SCALES

__all__ = ["with_computed_gradients"]


def with_computed_gradients(graph: Graph, *, turned: bool = True) -> Graph:
    """Return a training graph whose gradients are not cast or transposed back.

    With `turned` a gradient may have another layout than its parameter; it must not if
    it is added to a total in the parameter's layout.
    """
    readers = Counter(name for node in graph.nodes for name in node.inputs)

    def converts_back(node: Node) -> bool:
        if node.op == "to_channels_first":
            return turned
        return node.op == "cast" and graph.tensors[node.inputs[0]].dtype in LOSS_SCALES

    found: dict[str, str] = {}
    removed: set[str] = set()
    for w, gradient in graph.gradients.items():
        computed = gradient
        while (node := graph.producers.get(computed)) is not None and converts_back(
            node
        ):
            alone = readers[computed] == int(computed != gradient)
            if not alone or computed in graph.outputs:
                break
            removed.add(computed)
            (computed,) = node.inputs
        found[w] = computed
    tensors = {n: spec for n, spec in graph.tensors.items() if n not in removed}
    return replace(
        graph,
        tensors=MappingProxyType(tensors),
        nodes=tuple(n for n in graph.nodes if removed.isdisjoint(n.outputs)),
        gradients=MappingProxyType({**graph.gradients, **found}),
    )
