"""Dependencies between nodes: every order that respects them computes the same bits.

A node depends on the writers of the tensors that it reads. Where several nodes write
the same bytes (in-place results, state that a step changes), it also depends on the
last of them before it, and a node that overwrites depends on all readers of the bytes'
previous contents.
"""

from collections.abc import Iterable, Mapping, Sequence

from mucudnn.ir.graph import Graph, Node

__all__ = [
    "dependencies",
    "finished",
    "last_writes",
    "with_nodes_after",
    "writes_before",
    "written",
]


def written(graph: Graph, node: Node) -> tuple[str, ...]:
    """Return the storages whose bytes a node changes."""
    outputs = () if node.traits.view else node.outputs
    storages = graph.storages
    if len(outputs) == 1 and not node.mutates:  # most nodes
        return (storages[outputs[0]],)
    return tuple(dict.fromkeys(storages[t] for t in (*outputs, *node.mutates)))


def last_writes(graph: Graph) -> dict[str, int]:
    """Return the position of the last node that changes each storage."""
    return {s: i for i, node in enumerate(graph.nodes) for s in written(graph, node)}


def finished(graph: Graph, names: Iterable[str]) -> dict[str, int]:
    """Return the position of each tensor's last change; -1 if no node changes it."""
    writes = last_writes(graph)
    made = {t: i for i, node in enumerate(graph.nodes) for t in node.outputs}
    return {
        name: max(writes.get(graph.storages[name], -1), made.get(name, -1))
        for name in names
    }


def writes_before(graph: Graph, readers: Mapping[str, int]) -> dict[str, int]:
    """Return the position of the last write of each storage before its reader."""
    found: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        for storage in written(graph, node):
            if position < readers.get(storage, -1):
                found[storage] = position
    return found


def with_nodes_after(
    graph: Graph, more: Mapping[int, Sequence[Node]]
) -> tuple[Node, ...]:
    """Return a graph's nodes with others inserted behind positions; -1 is the front."""
    nodes = [*more.get(-1, ())]
    for position, node in enumerate(graph.nodes):
        nodes += (node, *more.get(position, ()))
    return tuple(nodes)


def dependencies(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the nodes that each node depends on, ascending."""
    storages = graph.storages
    producer: dict[str, int] = {}
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    result = []
    for position, node in enumerate(graph.nodes):
        before = {producer[name] for name in node.inputs if name in producer}
        changed = written(graph, node)
        read = {storages[name] for name in node.inputs}
        before.update(writer[s] for s in read.union(changed) if s in writer)
        for storage in changed:
            before.update(readers.pop(storage, ()))
            writer[storage] = position
        for storage in read.difference(changed):
            readers.setdefault(storage, []).append(position)
        producer.update(dict.fromkeys(node.outputs, position))
        result.append(tuple(sorted(before)))
    return tuple(result)
