"""Rewrite a graph so that groups of nodes are one node each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node
from mucudnn.torch.fusion.groups import Group
from mucudnn.torch.fusion.kernels import Kernel
from mucudnn.torch.fusion.members import passes_through
from mucudnn.torch.lowering.lowered import Call, Lowered, Operand


def fused(
    lowered: Lowered, groups: Sequence[Group], kernels: Mapping[str, Kernel]
) -> Lowered:
    """Return the same computation with these groups as nodes.

    A group takes the place of its last member; views of its results follow it.

    Args:
        lowered: The graph.
        groups: Disjoint groups of its nodes.
        kernels: Their kernels, by the group's name.
    """
    graph = lowered.graph
    members = {name for group in groups for name in group.members}
    nodes: list[tuple[int, int, Node]] = []
    calls = dict(lowered.calls)
    anchors: dict[str, int] = {}
    for group in groups:
        node = Node(
            group.name,
            "store" if group.mutates else "fused",
            group.inputs,
            group.outputs,
            phase=graph.by_name[group.members[0]].phase,
            mutates=group.mutates,
            traits=group.traits,
        )
        kernel = kernels[group.name]
        into = None if group.taken is None else kernel.into
        calls[node.name] = Call(
            kernel.run,
            tuple(map(Operand, range(len(group.inputs)))),
            MappingProxyType({}),
            tuple(range(len(group.outputs))),
            into=into,
            first=into is not None,
        )
        at = graph.positions[group.members[-1]]
        nodes.append((at, 0, node))
        anchors.update(dict.fromkeys(group.outputs, at))
    for at, node in enumerate(graph.nodes):
        if node.name in members:
            continue
        after = max((anchors.get(name, -1) for name in node.inputs), default=-1)
        if after > at:  # a view: all other readers come behind the last member
            anchors.update(dict.fromkeys(node.outputs, after))
        nodes.append((max(at, after), 1, node))
    ordered = [node for _, _, node in sorted(nodes, key=lambda row: row[:2])]
    kept = _read(lowered, ordered)
    there = {*graph.inputs, *(name for node in kept for name in node.outputs)}
    tensors = {name: spec for name, spec in graph.tensors.items() if name in there}
    return replace(
        lowered,
        graph=Graph(MappingProxyType(tensors), kept, graph.outputs),
        calls=MappingProxyType({node.name: calls[node.name] for node in kept}),
    )


def _read(lowered: Lowered, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes without views that nothing reads any more."""
    read = {name for name in lowered.results if isinstance(name, str)}
    read.update(lowered.graph.outputs)
    found = []
    for node in reversed(nodes):
        free = node.traits.view and passes_through(lowered, node)
        if free and read.isdisjoint(node.outputs):
            continue
        read.update(node.inputs)
        found.append(node)
    return tuple(reversed(found))
