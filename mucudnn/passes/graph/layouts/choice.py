"""Which of a network's nodes have channels last: the cheapest choice, exactly.

Each node computes in one of two layouts, at a price each; a tensor that is made in one
and read in the other is turned, once for all who read it so, at a price of its own. A
choice parts nodes in two, and what it costs is what is cut: a pipe for each price of a
node, and for each tensor one between two points that all who touch it are tied to, so
that it is cut if they are not all on one side (Lawler, 1973). So the cheapest choice is
a minimum cut. Of equal ones the one with the fewest nodes with channels last is taken.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mucudnn.arguments import one_of
from mucudnn.ir.channels_last import AUTO, LAYOUT_CHOICES, is_image
from mucudnn.ir.graph import Graph
from mucudnn.passes.graph.layouts.channels_last import able, free, with_channels_last
from mucudnn.passes.minimum_cut import SINK, SOURCE, Pipes

__all__ = [
    "LayoutCosts",
    "cheapest_layouts",
    "convolutions_last",
    "stored",
    "ties",
    "turned_bytes",
]


@dataclass(frozen=True, slots=True)
class LayoutCosts:
    """What a network costs, in any unit.

    Attributes:
        first: Node -> with channels first, of all that can have them last.
        last: Node -> with channels last; infinite where it cannot be had.
        turned: Image -> turned once.
    """

    first: Mapping[str, float]
    last: Mapping[str, float]
    turned: Mapping[str, float]

    def of(self, graph: Graph, chosen: frozenset[str]) -> float:
        """What a choice of nodes with channels last costs."""
        nodes = sum(
            self.last[name] if name in chosen else cost
            for name, cost in self.first.items()
        )
        return nodes + sum(
            self.turned[name]
            for name, tied in ties(graph, self.first).items()
            if len({member in chosen for member in tied}) > 1
        )


def cheapest_layouts(graph: Graph, costs: LayoutCosts) -> frozenset[str]:
    """The nodes that have channels last."""
    pipes = Pipes()
    for name, cost in costs.first.items():
        other = costs.last[name]
        least = min(cost, other)
        pipes.add(name, SINK, cost - least)
        pipes.add(SOURCE, name, other - least)
    for image, tied in ties(graph, costs.first).items():
        one, two = ("one", image), ("two", image)
        pipes.add(one, two, costs.turned[image])
        for name in tied:
            pipes.add(name or SOURCE, one, math.inf)
            pipes.add(two, name or SOURCE, math.inf)
    return frozenset(pipes.behind_cut().intersection(costs.first))  # type: ignore[arg-type]


def convolutions_last(graph: Graph) -> frozenset[str]:
    """All convolutions, and of other nodes those that leave fewest bytes to be turned.

    A node that nothing has to be turned for, either way, keeps its channels first.
    """
    nodes = able(graph)
    turned = turned_bytes(graph)
    most = 1 + sum(turned.values())
    kinds = {name: graph.by_name[name].traits.convolution for name in nodes}
    first = {name: most if kinds[name] else 0.0 for name in nodes}
    costs = LayoutCosts(first, dict.fromkeys(nodes, 0.0), turned)
    return cheapest_layouts(graph, costs)


def stored(graph: Graph, layout: str, chosen: frozenset[str] | None = None) -> Graph:
    """A forward graph with channels first, in another layout.

    Args:
        graph: The graph.
        layout: Of `LAYOUT_CHOICES`.
        chosen: For `auto`, nodes that have channels last.

    Raises:
        ValueError: There is no such layout, or it is `auto` and nothing was chosen.
    """
    one_of("layout", layout, LAYOUT_CHOICES)
    if layout == AUTO and chosen is None:
        raise ValueError(
            "which layout is fastest has to be measured here: choose NCHW or NHWC, or "
            "let a Trainer do it"
        )
    nodes = convolutions_last(graph) if layout == "NHWC" else chosen or frozenset()
    return graph if layout == "NCHW" else with_channels_last(graph, nodes)


def turned_bytes(graph: Graph) -> dict[str, float]:
    """Image -> bytes that are read and written to turn it."""
    images = (spec for spec in graph.tensors.values() if is_image(spec))
    return {s.name: 0.0 if free(s) else 2.0 * s.nbytes for s in images}


def ties(graph: Graph, nodes: Collection[str]) -> dict[str, set[str]]:
    """Image -> who makes it and who reads it; an empty name for who cannot choose.

    Images that one alone touches are not there: nothing turns them.
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
