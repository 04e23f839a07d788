"""Let one kernel do what several elementwise ones behind each other do.

A ReLU behind a batch normalisation, a bias or a sum, and a sum behind a normalisation,
read what was just written and write it again. One node does all of it: the tensors
between are never there. Which chains of operations there are kernels for is a table
(`FUSIONS`). The pass works on a forward graph; gradients of the fused nodes follow from
rules of their own, which apply the ReLU's gradient where the next gradient reads it.
Nothing but the last result of a chain may be read by anybody else. A convolution that
a library computes with bias and ReLU in one reads the bias as a third operand.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.operations import EPILOGUE, FUSIONS, make_node
from mucudnn.ir.tensor import TensorSpec

__all__ = ["Offers", "fused"]

Offers = Callable[[ConvProblem, str], bool]
"""(forward convolution, data type of a bias) -> whether there is a kernel that adds the
bias and applies a ReLU as well."""

Chain = tuple[Node, ...]
"""Nodes of which each reads the first result of the one before."""


def fused(graph: Graph, offers: Offers | None = None) -> Graph:
    """The same network in fewer nodes.

    Results are those of the network as it was, within a rounding; names of nodes are
    those of the first that each stands for.

    Args:
        graph: A forward graph.
        offers: Which forward convolutions do a bias and a ReLU as well.
    """
    graph = _chained(graph)
    return graph if offers is None else _with_epilogues(graph, offers)


def _with_epilogues(graph: Graph, offers: Offers) -> Graph:
    """Convolutions that do what bias and ReLU behind them did.

    A bias that no kernel takes as it is may be cast to what the convolution computes
    in, as its filter is.
    """
    within: dict[str, tuple[Node, str]] = {}  # node -> what does it, type of the bias
    for node in graph.nodes:
        before = _only_for(graph, node.inputs[0], node) if node.inputs else None
        if before is None or (before.op, node.op) != EPILOGUE:
            continue
        problem, own = before.attrs["problem"], graph.tensors[node.inputs[1]].dtype
        if problem.direction is Direction.FORWARD:
            kinds = (k for k in (own, problem.dtype) if offers(problem, k))
            if (kind := next(kinds, None)) is not None:
                within[node.name] = before, kind
    gone = {before.name for before, _ in within.values()}
    tensors, nodes = dict(graph.tensors), list[Node]()
    for node in graph.nodes:
        if node.name in gone:
            del tensors[node.outputs[0]]
        elif node.name in within:
            nodes += _taken_in(tensors, *within[node.name], node)
        else:
            nodes.append(node)
    return replace(graph, tensors=MappingProxyType(tensors), nodes=tuple(nodes))


def _taken_in(
    tensors: dict[str, TensorSpec], conv: Node, kind: str, behind: Node
) -> Iterator[Node]:
    """A convolution with what was behind it, and a cast of the bias before it."""
    bias = behind.inputs[1]
    if tensors[bias].dtype != kind:
        name, spec = f"{bias}:{kind}", tensors[bias]
        if name not in tensors:
            tensors[name] = TensorSpec(name, spec.shape, kind)
            yield make_node(tensors, f"{name}:cast", "cast", (bias,), (name,))
        bias = name
    inputs = *conv.inputs, bias
    made = conv.name, conv.op, inputs, behind.outputs, conv.attrs, conv.phase
    yield make_node(tensors, *made)


def _chained(graph: Graph) -> Graph:
    chains: dict[str, Chain] = {}
    gone: set[str] = set()
    for node in graph.nodes:
        for chain in _chains(graph, (node,)):
            names = {member.name for member in chain}
            if gone.isdisjoint(names) and _may_move(graph, chain):
                chains[node.name] = chain
                gone |= names
                break
    if not chains:
        return graph
    nodes = [
        _one(graph, chains[node.name]) if node.name in chains else node
        for node in graph.nodes
        if node.name in chains or node.name not in gone
    ]
    between = {node.outputs[0] for chain in chains.values() for node in chain[:-1]}
    tensors = {n: spec for n, spec in graph.tensors.items() if n not in between}
    return replace(graph, tensors=MappingProxyType(tensors), nodes=tuple(nodes))


def _chains(graph: Graph, behind: Chain) -> Iterator[Chain]:
    """Chains that there is a kernel for and that end so, the longest first.

    Of two that differ in what they begin with, the one that begins later comes first.
    """
    operations = tuple(node.op for node in behind)
    if not any(chain[-len(operations) :] == operations for chain in FUSIONS):
        return
    found = [
        before
        for name in dict.fromkeys(behind[0].inputs)
        if (before := _only_for(graph, name, behind[0])) is not None
    ]
    for before in sorted(found, key=lambda node: -graph.positions[node.name]):
        yield from _chains(graph, (before, *behind))
    if operations in FUSIONS:
        yield behind


def _only_for(graph: Graph, name: str, reader: Node) -> Node | None:
    """What writes a tensor that one node alone reads, once, and that keeps its type."""
    node = graph.producers.get(name)
    if node is None or name != node.outputs[0] or name in graph.outputs:
        return None
    if graph.readers[name] != (reader,) or reader.inputs.count(name) > 1:
        return None
    if any(graph.readers[other] for other in node.outputs[1:]):
        return None
    members = (name, *reader.inputs[:1], *reader.outputs[:1])
    if len({graph.tensors[member].dtype for member in members}) > 1:
        return None
    shared = any(
        graph.storages[other] == graph.storages[name]
        for other in graph.tensors
        if other != name
    )
    return None if shared else node


def _one(graph: Graph, chain: Chain) -> Node:
    """The node that a chain becomes: what it reads, in order, but what is between."""
    first, last = chain[0], chain[-1]
    between = {node.outputs[0] for node in chain[:-1]}
    inputs = tuple(
        name for node in chain for name in node.inputs if name not in between
    )
    return make_node(
        graph.tensors,
        first.name,
        FUSIONS[tuple(node.op for node in chain)],
        inputs,
        (*last.outputs, *first.outputs[1:]),
        first.attrs,
        first.phase,
        first.mutates,
    )


def _may_move(graph: Graph, chain: Sequence[Node]) -> bool:
    """Whether all may run where the last does: nothing between them minds."""
    positions, storages = graph.positions, graph.storages
    read = {storages[name] for node in chain for name in node.inputs}
    changed = {storages[name] for node in chain for name in node.mutates}
    own = {node.name for node in chain}
    for position in range(positions[chain[0].name], positions[chain[-1].name]):
        other = graph.nodes[position]
        if other.name in own:
            continue
        if not read.isdisjoint(graph.overwritten.get(position, ())):
            return False
        if not changed.isdisjoint(storages[name] for name in other.tensors):
            return False
    return True
