"""Let one kernel do what several elementwise ones behind each other do.

A ReLU behind a batch normalisation, a bias or a sum, and a sum behind a normalisation,
read what was just written and write it again. One node does all of it: the tensors
between are never there. The pass works on a forward graph; gradients of the fused nodes
follow from rules of their own, which apply the ReLU's gradient where the next gradient
reads it. Nothing but the last result of what is fused may be read by anybody else.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.operations import make_node

__all__ = ["fused"]

_NORM, _BIAS, _ADD, _RELU = "batch_norm", "bias", "add", "relu"


@dataclass(frozen=True, slots=True)
class _Group:
    """Nodes that become one, in order, and what that is.

    Attributes:
        op: The operation of the one node.
        nodes: What it stands for; it comes where the last of them is.
        inputs: What it reads.
    """

    op: str
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]


def fused(graph: Graph) -> Graph:
    """The same network in fewer nodes.

    Results are those of the network as it was, within a rounding; names of nodes are
    those of the first that each stands for.

    Args:
        graph: A forward graph.
    """
    groups: dict[str, _Group] = {}
    gone: set[str] = set()
    for node in graph.nodes:
        if node.op != _RELU:
            continue
        for group in _candidates(graph, node):
            names = {member.name for member in group.nodes}
            if gone.isdisjoint(names) and _may_move(graph, group.nodes):
                groups[node.name] = group
                gone |= names
                break
    if not groups:
        return graph
    nodes = [
        _one(graph, groups[node.name]) if node.name in groups else node
        for node in graph.nodes
        if node.name in groups or node.name not in gone
    ]
    between = {
        node.outputs[0] for group in groups.values() for node in group.nodes[:-1]
    }
    tensors = {n: spec for n, spec in graph.tensors.items() if n not in between}
    return replace(graph, tensors=MappingProxyType(tensors), nodes=tuple(nodes))


def _one(graph: Graph, group: _Group) -> Node:
    """The node that a group becomes."""
    first, last = group.nodes[0], group.nodes[-1]
    return make_node(
        graph.tensors,
        first.name,
        group.op,
        group.inputs,
        (*last.outputs, *first.outputs[1:]),
        first.attrs,
        first.phase,
        first.mutates,
    )


def _candidates(graph: Graph, relu: Node) -> Iterator[_Group]:
    """What a ReLU could be one node with, the most first."""
    before = _only_for(graph, relu.inputs[0], relu)
    if before is None:
        return
    if before.op == _ADD:
        yield from _sums(graph, before, relu)
    if before.op in (_NORM, _BIAS, _ADD):
        yield _Group(f"{before.op}_relu", (before, relu), before.inputs)


def _sums(graph: Graph, add: Node, relu: Node) -> Iterator[_Group]:
    """A normalisation with the sum behind it; the later one, if both terms are."""
    first, second = add.inputs
    if first == second:
        return
    terms = ((first, second), (second, first))
    positions = graph.positions
    found = [
        (positions[norm.name], norm, other)
        for term, other in terms
        if (norm := _only_for(graph, term, add)) is not None and norm.op == _NORM
    ]
    for _, norm, other in sorted(found, key=lambda entry: -entry[0]):
        inputs = (*norm.inputs, other)
        yield _Group("batch_norm_add_relu", (norm, add, relu), inputs)


def _only_for(graph: Graph, name: str, reader: Node) -> Node | None:
    """What writes a tensor that one node alone reads, and that keeps its type."""
    node = graph.producers.get(name)
    if node is None or name in graph.outputs or graph.readers[name] != (reader,):
        return None
    if any(graph.readers[other] for other in node.outputs[1:]):
        return None
    used = {graph.storages[t] for t in graph.tensors if t != name}
    one_type = {graph.tensors[t].dtype for t in (name, *reader.inputs, *reader.outputs)}
    shared = graph.storages[name] in used
    return None if shared or len(one_type) > 1 else node


def _may_move(graph: Graph, nodes: Sequence[Node]) -> bool:
    """Whether all may run where the last does: nothing between them minds."""
    positions, storages = graph.positions, graph.storages
    read = {storages[name] for node in nodes for name in node.inputs}
    changed = {storages[name] for node in nodes for name in node.mutates}
    own = {node.name for node in nodes}
    for position in range(positions[nodes[0].name], positions[nodes[-1].name]):
        other = graph.nodes[position]
        if other.name in own:
            continue
        if not read.isdisjoint(graph.overwritten.get(position, ())):
            return False
        if not changed.isdisjoint(storages[name] for name in other.tensors):
            return False
    return True
