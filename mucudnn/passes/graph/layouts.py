"""Choose channels-first or channels-last for every node, by measured costs."""

import math
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

from mucudnn.arguments import check_choice
from mucudnn.ir.channels_last import AUTO, LAYOUT_CHOICES, channels_last, is_image, last
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.operations import make_node
from mucudnn.ir.tensor import INTEGERS, Role, TensorSpec
from mucudnn.passes.graph.autodiff import RULES, Tape, fed_by_parameters


def channels_last_nodes(graph: Graph) -> frozenset[str]:
    """Return the nodes with images that support channels last."""
    tensors = graph.tensors
    return frozenset(
        node.name
        for node in graph.nodes
        if (images := _images(graph, node))
        and channels_last(node.op, images, node.attrs) is not None
        and all(spec.layout == "NCHW" for spec in images)
        and all(tensors[name].alias is None for name in node.outputs)
        and all(tensors[name].dtype not in INTEGERS for name in node.inputs)
    )


def _images(graph: Graph, node: Node) -> list[TensorSpec]:
    return [s for name in node.tensors if is_image(s := graph.tensors[name])]


def single_node_graph(graph: Graph, node: Node) -> Graph:
    """Return a graph of a single node, with the tensors that it touches."""
    tensors = {t: replace(graph.tensors[t], alias=None, offset=0) for t in node.tensors}
    return Graph(tensors, (node,), ())


def channels_last_graph(
    graph: Graph, node: Node, names: Mapping[str, str] = MappingProxyType({})
) -> Graph:
    """Return a graph of a single node, with channels last."""
    specs = {}
    for name, spec in single_node_graph(graph, node).tensors.items():
        own = names.get(name, name)
        specs[own] = last(spec, own) if is_image(spec) else spec
    images = _images(graph, node)
    how = channels_last(node.op, images, node.attrs)
    attrs = node.attrs if how is None else how.attrs(node.attrs, len(images[0].shape))
    made = make_node(
        specs,
        node.name,
        node.op,
        tuple(names.get(name, name) for name in node.inputs),
        tuple(names.get(name, name) for name in node.outputs),
        attrs,
        node.phase,
        node.mutates,
    )
    return Graph(specs, (made,), ())


def transpose_node(
    tensors: Mapping[str, TensorSpec], source: str, made: TensorSpec
) -> Node:
    """Return the node that transposes an image to the other layout."""
    op = "to_channels_last" if made.layout == "NHWC" else "to_channels_first"
    op = op if made.alias is None else "reshape"
    return make_node(tensors, f"{made.name}:turn", op, (source,), (made.name,))


def same_bytes(spec: TensorSpec) -> bool:
    """Return whether an image has the same bytes in both layouts."""
    _, c, *spatial = spec.shape
    return c == 1 or set(spatial) == {1}


def with_channels_last(graph: Graph, nodes: Collection[str]) -> Graph:
    """Return the network with channels last in some of its nodes."""
    if not nodes:
        return graph
    tensors, made = dict(graph.tensors), list[Node]()
    last_of: dict[str, str] = {}  # tensor -> its form with channels last
    first_of: dict[str, str] = {}  # the same, first; "" if not yet made

    def transposed(of: str, source: str, spec: TensorSpec) -> str:
        if same_bytes(graph.tensors[of]):
            spec = replace(spec, alias=source)
        tensors[spec.name] = spec
        made.append(transpose_node(tensors, source, spec))
        return spec.name

    def with_last(name: str) -> str:
        if name not in last_of:
            spec = replace(graph.tensors[name], role=Role.ACTIVATION)
            last_of[name] = transposed(name, name, last(spec, f"{name}:NHWC"))
        return last_of[name]

    def with_first(name: str) -> str:
        if first_of.get(name) == "":
            spec = replace(graph.tensors[name], name=f"{name}:NCHW")
            first_of[name] = transposed(name, name, spec)
        return first_of.get(name, name)

    for node in graph.nodes:
        if node.name not in nodes:
            now = {name: with_first(name) for name in node.inputs}
            inputs = tuple(now[name] for name in node.inputs)
            made.append(replace(node, inputs=inputs))
            for name in node.outputs:
                spec = tensors[name]
                if spec.alias in now:  # a view of the form that is read
                    tensors[name] = replace(spec, alias=now[spec.alias])
            continue
        read = [name for name in node.inputs if is_image(graph.tensors[name])]
        results = [name for name in node.outputs if is_image(graph.tensors[name])]
        names = {name: with_last(name) for name in read}
        names |= {name: f"{name}:NHWC" for name in results if name in graph.outputs}
        one = channels_last_graph(graph, node, names)
        made += one.nodes
        tensors |= {name: one.tensors[name] for name in one.nodes[0].outputs}
        for name in results:
            own = last_of[name] = names.get(name, name)
            if own == name:
                first_of[name] = ""
            else:  # outputs of the graph keep their name and channels first
                transposed(name, own, graph.tensors[name])
    return replace(graph, tensors=tensors, nodes=tuple(made))


# Choose the nodes with channels last at the least total cost, exactly.
#
# Each node has a cost in either layout; a tensor used in both is transposed, once for
# all its readers, at a cost of its own. A choice divides the nodes in two sets, and its
# cost is that of a cut: every node has an edge for each of its costs, and every tensor
# an edge between two auxiliary vertices tied to all nodes that touch it, which is cut
# unless they are all on one side (Lawler, 1973). The cheapest choice is therefore a
# minimum cut. Of equal cuts the one with the fewest channels-last nodes is chosen.


@dataclass(frozen=True, slots=True)
class LayoutCosts:
    """Costs of layouts, in any unit.

    Attributes:
        first: Cost with channels first of each node that supports channels last.
        last: Cost of the same nodes with channels last; infinite if unavailable.
        transposed: Cost of transposing each image once.
    """

    first: Mapping[str, float]
    last: Mapping[str, float]
    transposed: Mapping[str, float]


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
        network.add(one, two, costs.transposed[image])
        for name in tied:
            network.add(name or SOURCE, one, math.inf)
            network.add(two, name or SOURCE, math.inf)
    return frozenset(network.sink_side().intersection(costs.first))  # type: ignore[arg-type]


def convolutions_last(graph: Graph) -> frozenset[str]:
    """Return all convolutions, and further nodes that minimise transposed bytes."""
    nodes = channels_last_nodes(graph)
    transposed = transposed_bytes(graph)
    most = 1 + sum(transposed.values())
    kinds = {name: graph.by_name[name].traits.convolution for name in nodes}
    first = {name: most if kinds[name] else 0.0 for name in nodes}
    costs = LayoutCosts(first, dict.fromkeys(nodes, 0.0), transposed)
    return cheapest_layouts(graph, costs)


def with_layout(
    graph: Graph, layout: str, chosen: frozenset[str] | None = None
) -> Graph:
    """Convert a forward graph with channels first; `chosen` are last for `auto`.

    Raises:
        ValueError: The layout is unknown, or `auto` without chosen nodes.
    """
    check_choice("layout", layout, LAYOUT_CHOICES)
    if layout == AUTO and chosen is None:
        raise ValueError(
            "the fastest layout has to be measured: choose NCHW or NHWC, or let a "
            "Trainer measure it"
        )
    nodes = convolutions_last(graph) if layout == "NHWC" else chosen or frozenset()
    return graph if layout == "NCHW" else with_channels_last(graph, nodes)


def transposed_bytes(graph: Graph) -> dict[str, float]:
    """Return the bytes that transposing each image reads and writes."""
    images = (spec for spec in graph.tensors.values() if is_image(spec))
    return {s.name: 0.0 if same_bytes(s) else 2.0 * s.nbytes for s in images}


def image_edges(graph: Graph, nodes: Collection[str]) -> dict[str, set[str]]:
    """Return the nodes that touch each image; "" is any node with a fixed layout."""
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
        # An image with a single node is never transposed.
        if len(tied) > 1:
            found[name] = tied
    return found


# Trials that have to be timed before layouts are chosen: each node in both layouts.
#
# A trial is a node with its gradients, or the transposition of an image and its
# gradient; filter gradients are not transposed back, as updates read them as they are
# (`computed_gradients`). All trials form one graph of independent nodes, so that any
# profiler of graphs can time them. Equal trials are timed once.


@dataclass(frozen=True, slots=True)
class LayoutTrials:
    """Graph of trials, and the number of the trial of each node and image.

    Attributes:
        graph: All trials side by side.
        first: Trial with channels first of each node that supports channels last.
        last: Trial of the same nodes with channels last.
        transposed: Trial of transposing each image with several nodes; None if both
            layouts have the same bytes.
    """

    graph: Graph
    first: Mapping[str, int]
    last: Mapping[str, int]
    transposed: Mapping[str, int | None]

    def costs(self, node_ms: Mapping[str, float]) -> LayoutCosts:
        """Return the costs of layouts from the times of the nodes of `graph`."""
        total: dict[int | None, float] = {None: 0.0}
        for node in self.graph.nodes:
            number = int(node.name.partition(":")[0])
            total[number] = total.get(number, 0.0) + node_ms[node.name]
        first, other, transposed = (
            MappingProxyType({name: total[trial] for name, trial in of.items()})
            for of in (self.first, self.last, self.transposed)
        )
        return LayoutCosts(first, other, transposed)


def layout_trials(
    graph: Graph, nodes: Collection[str], *, trains: bool
) -> LayoutTrials:
    """Return the trials of `nodes`, with their gradients if the graph is trained."""
    fed = fed_by_parameters(graph) if trains else set()
    tensors: dict[str, TensorSpec] = {}
    made: list[Node] = []
    known: dict[Hashable, int] = {}

    def number_of(one: Graph) -> int:
        """Add the trial of a node and its gradients, once; return its number."""
        if (key := _signature(one)) in known:
            return known[key]
        number = known[key] = len(known)
        (node,) = one.nodes
        tape = Tape(one)
        if tape.wants(node.outputs[0]) and node.op in RULES:
            tape.seed(node.outputs[0], None)
            RULES[node.op](tape, node)

        def prefixed(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(f"{number}:{name}" for name in names)

        for name, spec in tape.tensors.items():
            alias = None if spec.alias is None else f"{number}:{spec.alias}"
            own = replace(spec, name=f"{number}:{name}", alias=alias)
            tensors[own.name] = own
        made.extend(
            replace(
                node,
                name=f"{number}:{node.name}",
                inputs=prefixed(node.inputs),
                outputs=prefixed(node.outputs),
                mutates=prefixed(node.mutates),
            )
            for node in tape.nodes
        )
        return number

    first: dict[str, int] = {}
    other: dict[str, int] = {}
    # Every node is tried as it is and with channels last.
    for node in graph.nodes:
        if node.name in nodes:
            one = _with_wanted_gradients(single_node_graph(graph, node), fed)
            first[node.name] = number_of(one)
            one = _with_wanted_gradients(channels_last_graph(graph, node), fed)
            other[node.name] = number_of(one)
    images = (graph.tensors[name] for name in image_edges(graph, nodes))
    # Gradients of parameters, and of their casts, are not transposed back.
    weights = {spec.name for spec in graph.with_role(Role.PARAMETER)}
    for node in graph.nodes:
        if node.op == "cast" and weights.issuperset(node.inputs):
            weights.update(node.outputs)
    transposed = {
        spec.name: None
        if same_bytes(spec)
        else number_of(_transposition(spec, fed - weights))
        for spec in images
        if spec.layout == "NCHW"
    }
    every = Graph(tensors, tuple(made), ())
    return LayoutTrials(every, first, other, transposed)


def _with_wanted_gradients(one: Graph, fed: Collection[str]) -> Graph:
    """Mark the inputs whose gradients are wanted as parameters."""

    def role(spec: TensorSpec) -> Role:
        if spec.name in one.producers or spec.role is Role.STATE:
            return spec.role
        return Role.PARAMETER if spec.name in fed else Role.INPUT

    tensors = {t: replace(spec, role=role(spec)) for t, spec in one.tensors.items()}
    return replace(one, tensors=tensors)


def _transposition(spec: TensorSpec, fed: Collection[str]) -> Graph:
    source = replace(spec, alias=None, offset=0)
    made = last(spec, f"{spec.name}:NHWC")
    tensors = {source.name: source, made.name: replace(made, role=Role.ACTIVATION)}
    node = transpose_node(tensors, source.name, made)
    return _with_wanted_gradients(Graph(tensors, (node,), ()), fed)


def _signature(one: Graph) -> Hashable:
    """Return everything a trial's time depends on."""
    (node,) = one.nodes
    specs = (one.tensors[name] for name in node.tensors)
    return (
        node.op,
        tuple(sorted((k, v) for k, v in node.attrs.items() if k != "seed")),
        tuple((s.shape, s.dtype, s.role, s.layout) for s in specs),
        tuple(node.tensors.index(name) for name in node.tensors),
    )


# Minimum cut of a flow network, by Dinic's algorithm (1970).
#
# Flow is augmented along shortest paths from the source to the sink until none is left;
# the saturated edges are then a minimum cut (Ford and Fulkerson, 1956).


SOURCE, SINK = "source", "sink"

_ROUNDING = 1e-12
"""Residual capacities below this part of the largest capacity are rounding errors."""


class FlowNetwork:
    """A flow network; its vertices include `SOURCE` and `SINK`."""

    def __init__(self) -> None:
        self._residual: dict[Hashable, dict[Hashable, float]] = defaultdict(dict)
        self._largest = 0.0

    def add(self, start: Hashable, end: Hashable, capacity: float) -> None:
        """Add capacity to a directed edge; an infinite edge is never cut."""
        ways = self._residual[start]
        ways[end] = ways.get(end, 0.0) + capacity
        self._residual[end].setdefault(start, 0.0)
        if capacity != float("inf"):
            self._largest = max(self._largest, capacity)

    def sink_side(self) -> set[Hashable]:
        """Return the sink's side of a minimum cut, the smallest if there are several.

        The network is consumed: no other method may be called afterwards.
        """
        while (depth := self._depths(SOURCE)).get(SINK):
            ways = {vertex: list(ends) for vertex, ends in self._residual.items()}
            while self._augment(depth, ways):
                pass
        return set(self._depths(SINK, backward=True))

    def _has_residual(self, start: Hashable, end: Hashable) -> bool:
        return self._residual[start][end] > _ROUNDING * self._largest

    def _depths(self, root: Hashable, *, backward: bool = False) -> dict[Hashable, int]:
        """Return the vertices reachable from `root`, with their distances.

        With `backward`, return those that reach it.
        """
        depth: dict[Hashable, int] = {root: 0}
        queue: deque[Hashable] = deque([root])
        while queue:
            vertex = queue.popleft()
            for other in self._residual[vertex]:
                way = (other, vertex) if backward else (vertex, other)
                if other not in depth and self._has_residual(*way):
                    depth[other] = depth[vertex] + 1
                    queue.append(other)
        return depth

    def _augment(
        self, depth: dict[Hashable, int], ways: dict[Hashable, list[Hashable]]
    ) -> bool:
        """Augment one shortest path; dead ends are removed from `ways`."""
        path: list[Hashable] = [SOURCE]
        while path[-1] != SINK:
            vertex = path[-1]
            while ways[vertex]:
                end = ways[vertex][-1]
                if depth.get(end) == depth[vertex] + 1 and self._has_residual(
                    vertex, end
                ):
                    path.append(end)
                    break
                ways[vertex].pop()
            else:
                if len(path) == 1:
                    return False
                path.pop()
                ways[path[-1]].pop()
        # Send as much flow along the path as its narrowest edge has left.
        pairs = list(pairwise(path))
        amount = min(self._residual[start][end] for start, end in pairs)
        for start, end in pairs:
            self._residual[start][end] -= amount
            self._residual[end][start] += amount
        return True
