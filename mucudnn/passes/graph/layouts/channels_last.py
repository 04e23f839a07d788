"""Store the images of some of a network's nodes with channels last.

Where nodes of different layouts share a tensor, a node transposes it, once for all its
readers in that layout; with one pixel or one channel it is a view instead. Parameters
keep their layout, so that weight files are the same for every layout; filters are
transposed before convolutions read them. The pass works on a forward graph; gradients
have the layouts of their tensors.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.channels_last import channels_last, is_image, last
from mucudnn.ir.graph import Graph, Node, Role
from mucudnn.ir.operations import make_node
from mucudnn.ir.tensor import INTEGERS, TensorSpec

__all__ = [
    "able",
    "alone",
    "alone_channels_last",
    "free",
    "turn",
    "with_channels_last",
]


def able(graph: Graph) -> frozenset[str]:
    """Return the nodes with images that support channels last."""
    return frozenset(
        node.name for node in graph.nodes if _supports_channels_last(graph, node)
    )


def _supports_channels_last(graph: Graph, node: Node) -> bool:
    images = _images(graph, node)
    read = [graph.tensors[name] for name in node.inputs]
    made = [graph.tensors[name] for name in node.outputs]
    return (
        bool(images)
        and channels_last(node.op, images, node.attrs) is not None
        and all(spec.layout == "NCHW" for spec in images)
        and all(spec.alias is None for spec in made)
        and all(spec.dtype not in INTEGERS for spec in read)
    )


def _images(graph: Graph, node: Node) -> list[TensorSpec]:
    return [s for name in node.tensors if is_image(s := graph.tensors[name])]


def alone(graph: Graph, node: Node) -> Graph:
    """Return a graph of a single node, with the tensors that it touches."""
    tensors = {t: replace(graph.tensors[t], alias=None, offset=0) for t in node.tensors}
    return Graph(MappingProxyType(tensors), (node,), ())


def alone_channels_last(
    graph: Graph, node: Node, names: Mapping[str, str] = MappingProxyType({})
) -> Graph:
    """Return a graph of a single node, with channels last."""
    specs = {}
    for name, spec in alone(graph, node).tensors.items():
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
        MappingProxyType(dict(attrs)),
        node.phase,
        node.mutates,
    )
    return Graph(MappingProxyType(specs), (made,), ())


def turn(tensors: Mapping[str, TensorSpec], source: str, made: TensorSpec) -> Node:
    """Return the node that transposes an image to the other layout."""
    op = "to_channels_last" if made.layout == "NHWC" else "to_channels_first"
    op = op if made.alias is None else "reshape"
    return make_node(tensors, f"{made.name}:turn", op, (source,), (made.name,))


def free(spec: TensorSpec) -> bool:
    """Return whether an image has the same bytes in both layouts."""
    _, c, *spatial = spec.shape
    return c == 1 or set(spatial) == {1}


def with_channels_last(graph: Graph, nodes: Collection[str]) -> Graph:
    """Return the network with channels last in some of its nodes."""
    if not nodes:
        return graph
    rewriter = _LayoutRewriter(graph)
    for node in graph.nodes:
        rewriter.add(node, node.name in nodes)
    return rewriter.graph()


class _LayoutRewriter:
    """A graph being rewritten, and the layouts in which each tensor is available."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._tensors: dict[str, TensorSpec] = dict(graph.tensors)
        self._nodes: list[Node] = []
        self._last: dict[str, str] = {}  # tensor -> its form with channels last
        self._first: dict[str, str] = {}  # the same, first; "" if not yet made

    def add(self, node: Node, channels_last: bool) -> None:
        """Append a node, on tensors in the right layout."""
        if not channels_last:
            now = {name: self._with_channels_first(name) for name in node.inputs}
            inputs = tuple(now[name] for name in node.inputs)
            self._nodes.append(replace(node, inputs=inputs))
            for name in node.outputs:
                spec = self._tensors[name]
                if spec.alias in now:  # a view of the form that is read
                    self._tensors[name] = replace(spec, alias=now[spec.alias])
            return
        graph = self._graph
        read = [name for name in node.inputs if is_image(graph.tensors[name])]
        made = [name for name in node.outputs if is_image(graph.tensors[name])]
        names = {name: self._with_channels_last(name) for name in read}
        names |= {name: f"{name}:NHWC" for name in made if name in graph.outputs}
        one = alone_channels_last(graph, node, names)
        self._nodes += one.nodes
        self._tensors |= {name: one.tensors[name] for name in one.nodes[0].outputs}
        for name in made:
            own = self._last[name] = names.get(name, name)
            if own == name:
                self._first[name] = ""
            else:  # outputs of the graph keep their name and channels first
                self._turn(name, own, graph.tensors[name])

    def graph(self) -> Graph:
        """Return the rewritten graph."""
        tensors, nodes = MappingProxyType(self._tensors), tuple(self._nodes)
        return replace(self._graph, tensors=tensors, nodes=nodes)

    def _with_channels_last(self, name: str) -> str:
        if name not in self._last:
            spec = replace(self._graph.tensors[name], role=Role.ACTIVATION)
            self._last[name] = self._turn(name, name, last(spec, f"{name}:NHWC"))
        return self._last[name]

    def _with_channels_first(self, name: str) -> str:
        if self._first.get(name) == "":
            spec = replace(self._graph.tensors[name], name=f"{name}:NCHW")
            self._first[name] = self._turn(name, name, spec)
        return self._first.get(name, name)

    def _turn(self, of: str, source: str, made: TensorSpec) -> str:
        if free(self._graph.tensors[of]):
            made = replace(made, alias=source)
        self._tensors[made.name] = made
        self._nodes.append(turn(self._tensors, source, made))
        return made.name
