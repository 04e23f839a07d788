"""Choose the nodes with channels last at the least total cost, exactly.

Each node has a cost in either layout; a tensor used in both is transposed, once for all
its readers, at a cost of its own. A choice divides the nodes in two sets, and its cost
is that of a cut: every node has an edge for each of its costs, and every tensor an edge
between two auxiliary vertices tied to all nodes that touch it, which is cut unless they
are all on one side (Lawler, 1973). The cheapest choice is therefore a minimum cut. Of
equal cuts the one with the fewest channels-last nodes is chosen.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mucudnn.arguments import one_of
from mucudnn.ir.channels_last import AUTO, LAYOUT_CHOICES, is_image
from mucudnn.ir.graph import Graph
from mucudnn.passes.graph.layouts.channels_last import able, free, with_channels_last
from mucudnn.passes.minimum_cut import SINK, SOURCE, FlowNetwork

__all__ = [
    "LayoutCosts",
    "cheapest_layouts",
    "convolutions_last",
    "image_edges",
    "stored",
    "transposed_bytes",
]


@dataclass(frozen=True, slots=True)
class LayoutCosts:
    """Costs of layouts, in any unit.

    Attributes:
        first: Cost with channels first of each node that supports channels last.
        last: Cost of the same nodes with channels last; infinite if unavailable.
        turned: Cost of transposing each image once.
    """

    first: Mapping[str, float]
    last: Mapping[str, float]
    turned: Mapping[str, float]

    def of(self, graph: Graph, chosen: frozenset[str]) -> float:
        """Return the cost of a choice of nodes with channels last."""
        nodes = sum(
            self.last[name] if name in chosen else cost
            for name, cost in self.first.items()
        )
        return nodes + sum(
            self.turned[name]
            for name, tied in image_edges(graph, self.first).items()
            if len({member in chosen for member in tied}) > 1
        )


def cheapest_layouts(graph: Graph, costs: LayoutCosts) -> frozenset[str]:
    """Return the nodes with channels last in the cheapest choice."""
    network = FlowNetwork()
    for name, cost in costs.first.items():
        other = costs.last[name]
        least = min(cost, other)
        network.add(name, SINK, cost - least)
        network.add(SOURCE, name, other - least)
    for image, tied in image_edges(graph, costs.first).items():
        one, two = ("one", image), ("two", image)
        network.add(one, two, costs.turned[image])
        for name in tied:
            network.add(name or SOURCE, one, math.inf)
            network.add(two, name or SOURCE, math.inf)
    return frozenset(network.sink_side().intersection(costs.first))  # type: ignore[arg-type]


def convolutions_last(graph: Graph) -> frozenset[str]:
    """Return all convolutions, and further nodes that minimise transposed bytes."""
    nodes = able(graph)
    turned = transposed_bytes(graph)
    most = 1 + sum(turned.values())
    kinds = {name: graph.by_name[name].traits.convolution for name in nodes}
    first = {name: most if kinds[name] else 0.0 for name in nodes}
    costs = LayoutCosts(first, dict.fromkeys(nodes, 0.0), turned)
    return cheapest_layouts(graph, costs)


def stored(graph: Graph, layout: str, chosen: frozenset[str] | None = None) -> Graph:
    """Convert a forward graph with channels first to another layout.

    Args:
        graph: The graph.
        layout: One of `LAYOUT_CHOICES`.
        chosen: Nodes with channels last, for `auto`.

    Raises:
        ValueError: The layout is unknown, or `auto` without chosen nodes.
    """
    one_of("layout", layout, LAYOUT_CHOICES)
    if layout == AUTO and chosen is None:
        raise ValueError(
            "which layout is fastest has to be measured here: choose NCHW or NHWC, or "
            "let a Trainer do it"
        )
    nodes = convolutions_last(graph) if layout == "NHWC" else chosen or frozenset()
    return graph if layout == "NCHW" else with_channels_last(graph, nodes)


def transposed_bytes(graph: Graph) -> dict[str, float]:
    """Return the bytes that transposing each image reads and writes."""
    images = (spec for spec in graph.tensors.values() if is_image(spec))
    return {s.name: 0.0 if free(s) else 2.0 * s.nbytes for s in images}


def image_edges(graph: Graph, nodes: Collection[str]) -> dict[str, set[str]]:
    """Return the nodes that touch each image; "" stands for nodes with a fixed layout.

    Images with a single node are omitted: they are never transposed.
    """
    found = {}
    for name, spec in graph.tensors.items():
        if not is_image(spec):
            continue
        makes = graph.producers.get(name)
        touching = {node.name for node in graph.readers[name]}
        touching.add("" if makes is None else makes.name)
        if name in graph.outputs:
            touching.add("")
        tied = {member if member in nodes else "" for member in touching}
        if len(tied) > 1:
            found[name] = tied
    return found
