"""Fuse chains of elementwise operations into single kernels.

A ReLU behind a batch normalisation, a bias or a sum, and a sum behind a normalisation,
read a tensor that was just written and write it again. A fused node never writes the
intermediate tensors. The table `FUSIONS` lists the chains that have kernels. The pass
works on a forward graph; fused nodes have gradient rules of their own, which apply the
ReLU's gradient where the next gradient reads it. Only the last result of a chain may
have other readers. A convolution with a library kernel for bias and ReLU reads the bias
as a third operand.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.operations import EPILOGUE, FUSIONS, make_node
from mucudnn.ir.tensor import TensorSpec

Offers = Callable[[ConvProblem, str], bool]
"""(forward convolution, dtype of a bias) -> whether a kernel also adds the bias and
applies a ReLU."""

Chain = tuple[Node, ...]
"""Nodes that each read the first result of the node before."""


def fuse_elementwise(graph: Graph, offers: Offers | None = None) -> Graph:
    """Return the network with chains of operations fused.

    Results are equal up to rounding; a fused node has the name of its chain's first.
    """
    graph = _fuse_chains(graph)
    return graph if offers is None else _with_epilogues(graph, offers)


def _with_epilogues(graph: Graph, offers: Offers) -> Graph:
    """Fuse bias and ReLU into convolutions."""
    within: dict[str, tuple[Node, str]] = {}  # epilogue -> convolution, dtype of bias
    for node in graph.nodes:
        before = _fusable_producer(graph, node.inputs[0], node) if node.inputs else None
        if before is None or (before.op, node.op) != EPILOGUE:
            continue
        problem, own = before.attrs["problem"], graph.tensors[node.inputs[1]].dtype
        if problem.direction is Direction.FORWARD:
            # A bias whose dtype no kernel takes may be cast to the convolution's, like
            # filters.
            kinds = (k for k in (own, problem.dtype) if offers(problem, k))
            if (kind := next(kinds, None)) is not None:
                within[node.name] = before, kind
    removed = {before.name for before, _ in within.values()}
    tensors, nodes = dict(graph.tensors), list[Node]()
    for node in graph.nodes:
        if node.name in removed:
            del tensors[node.outputs[0]]
        elif node.name in within:
            nodes += _conv_with_epilogue(tensors, *within[node.name], node)
        else:
            nodes.append(node)
    return replace(graph, tensors=tensors, nodes=tuple(nodes))


def _conv_with_epilogue(
    tensors: dict[str, TensorSpec], conv: Node, kind: str, behind: Node
) -> Iterator[Node]:
    """Yield a convolution with its epilogue, and before it a cast of the bias."""
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


def _fuse_chains(graph: Graph) -> Graph:
    chains: dict[str, Chain] = {}
    removed: set[str] = set()
    for node in graph.nodes:
        for chain in _chains(graph, (node,)):
            names = {member.name for member in chain}
            if removed.isdisjoint(names) and _can_run_at_end(graph, chain):
                chains[node.name] = chain
                removed |= names
                break
    if not chains:
        return graph
    nodes = [
        _fused_node(graph, chains[node.name]) if node.name in chains else node
        for node in graph.nodes
        if node.name in chains or node.name not in removed
    ]
    # Results within a chain are never written, and have no tensors.
    between = {node.outputs[0] for chain in chains.values() for node in chain[:-1]}
    tensors = {n: spec for n, spec in graph.tensors.items() if n not in between}
    return replace(graph, tensors=tensors, nodes=tuple(nodes))


def _chains(graph: Graph, behind: Chain) -> Iterator[Chain]:
    """Yield chains with a kernel that end in `behind`, longest and latest first."""
    operations = tuple(node.op for node in behind)
    if not any(chain[-len(operations) :] == operations for chain in FUSIONS):
        return
    found = [
        before
        for name in dict.fromkeys(behind[0].inputs)
        if (before := _fusable_producer(graph, name, behind[0])) is not None
    ]
    for before in sorted(found, key=lambda node: -graph.positions[node.name]):
        yield from _chains(graph, (before, *behind))
    if operations in FUSIONS:
        yield behind


def _fusable_producer(graph: Graph, name: str, reader: Node) -> Node | None:
    """Return the producer of a tensor whose only use is one read in the same dtype."""
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
    # No other tensor may share bytes that the fused node never writes.
    shared = any(
        graph.storages[other] == graph.storages[name]
        for other in graph.tensors
        if other != name
    )
    return None if shared else node


def _fused_node(graph: Graph, chain: Chain) -> Node:
    """Return the fused node of a chain; it reads all inputs except intermediates."""
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


def _can_run_at_end(graph: Graph, chain: Sequence[Node]) -> bool:
    """Return whether a whole chain may run at the position of its last node."""
    positions, storages = graph.positions, graph.storages
    read = {storages[name] for node in chain for name in node.inputs}
    changed = {storages[name] for node in chain for name in node.mutates}
    own = {node.name for node in chain}
    # In between nobody may overwrite what the chain reads, or use what it changes.
    for position in range(positions[chain[0].name], positions[chain[-1].name]):
        other = graph.nodes[position]
        if other.name in own:
            continue
        if not read.isdisjoint(graph.overwritten.get(position, ())):
            return False
        if not changed.isdisjoint(storages[name] for name in other.tensors):
            return False
    return True
