"""Which nodes must stay before which: everything that fixes the result of a graph.

A node waits for the one that writes a tensor it reads. Where several nodes write the
same bytes (results in place, state that a step changes), it waits as well for the last
of them before it, and one that overwrites waits for all who read what was there. An
order that keeps these pairs computes the same bits.
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
    """Storages whose bytes a node changes."""
    outputs = () if node.traits.view else node.outputs
    storages = graph.storages
    if len(outputs) == 1 and not node.mutates:  # most nodes
        return (storages[outputs[0]],)
    return tuple(dict.fromkeys(storages[t] for t in (*outputs, *node.mutates)))


def last_writes(graph: Graph) -> dict[str, int]:
    """Storage -> the position of the last node that changes its bytes."""
    return {s: i for i, node in enumerate(graph.nodes) for s in written(graph, node)}


def finished(graph: Graph, names: Iterable[str]) -> dict[str, int]:
    """Tensor -> the position of the last node that changes it, or makes a view of it.

    What no node makes or changes is there at -1.
    """
    writes = last_writes(graph)
    made = {t: i for i, node in enumerate(graph.nodes) for t in node.outputs}
    return {
        name: max(writes.get(graph.storages[name], -1), made.get(name, -1))
        for name in names
    }


def writes_before(graph: Graph, readers: Mapping[str, int]) -> dict[str, int]:
    """Storage -> the last node that changes its bytes before one that reads it.

    Args:
        graph: Of a step.
        readers: Storage -> the position of the reader.
    """
    found: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        for storage in written(graph, node):
            if position < readers.get(storage, -1):
                found[storage] = position
    return found


def with_nodes_after(
    graph: Graph, more: Mapping[int, Sequence[Node]]
) -> tuple[Node, ...]:
    """The nodes of a graph and others right behind them; behind -1 is before all."""
    nodes = [*more.get(-1, ())]
    for position, node in enumerate(graph.nodes):
        nodes += (node, *more.get(position, ()))
    return tuple(nodes)


def dependencies(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For every node the positions of those it waits for, ascending."""
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
