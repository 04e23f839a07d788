"""What a step changes for good: new values go where the old ones are.

A functional graph returns new parameters, buffers and state beside the old ones. Here a
value that may be computed in the place of the old one is; any other is copied there.
Updates run as soon as what they need is there, so that gradients die young. Buffers
change after the backward pass: until then what is computed again finds the old ones.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.ir.graph import Graph, Node, Phase, TensorSpec
from mucudnn.torch.lowering.lowered import Call, Lowered, Operand

__all__ = ["with_updates"]


def with_updates(lowered: Lowered, late: frozenset[str]) -> Lowered:
    """The same step with its results stored in its inputs.

    Args:
        lowered: Its results are those to return and then one for each input: the input
            itself, or its new value.
        late: Inputs that change after the backward pass.
    """
    count = len(lowered.results) - len(lowered.inputs)
    stores = {
        target: value
        for target, value in zip(lowered.inputs, lowered.results[count:], strict=True)
        if target is not None and isinstance(value, str) and value != target
    }
    returned = lowered.results[:count]
    writer = _Writer(lowered, stores)
    nodes, tensors = writer.written()
    made = {name for node in nodes for name in node.outputs}
    asked = tuple(dict.fromkeys(r for r in returned if r in made))
    ordered = _ordered(lowered.graph, nodes, stores, late)
    graph = Graph(MappingProxyType(tensors), ordered, asked)
    return replace(lowered, graph=graph, calls=writer.calls, results=returned)


class _Writer:
    """Nodes that write what a step changes, in place where they may."""

    def __init__(self, lowered: Lowered, stores: Mapping[str, str]) -> None:
        self.calls: dict[str, Call] = dict(lowered.calls)
        self._lowered = lowered
        self._graph = lowered.graph
        self._stores = stores
        self._in_place: dict[str, str] = {}  # value -> the input it overwrites
        self._read: dict[str, list[int]] = {}  # storage -> positions that read it
        for position, node in enumerate(self._graph.nodes):
            for name in node.inputs:
                storage = self._graph.storages[name]
                self._read.setdefault(storage, []).append(position)
        self._times = Counter(stores.values())

    def written(self) -> tuple[list[Node], dict[str, TensorSpec]]:
        """All nodes, in an order that works, and all tensors."""
        copied = [pair for pair in self._stores.items() if not self._overwrites(*pair)]
        tensors = dict(self._graph.tensors)
        for value, target in self._in_place.items():
            tensors[value] = replace(tensors[value], alias=target)
        nodes = [self._node(node) for node in self._graph.nodes]
        return nodes + [self._copy(*pair) for pair in copied], tensors

    def _node(self, node: Node) -> Node:
        target = self._in_place.get(node.outputs[0]) if node.outputs else None
        if target is None:
            return node
        inputs = dict.fromkeys((*node.inputs, target))
        return replace(node, op="store", inputs=tuple(inputs), mutates=(target,))

    def _copy(self, target: str, value: str) -> Node:
        name = f"store.{target}"
        self.calls[name] = Call(
            torch.ops.aten.copy_.default, (Operand(0), Operand(1)), {}, ()
        )
        return Node(
            name, "store", (target, value), (), phase=Phase.UPDATE, mutates=(target,)
        )

    def _overwrites(self, target: str, value: str) -> bool:
        """Whether a value, and what it alone is made of, is computed in its place."""
        if self._times[value] > 1 or not self._may(target, value):
            return False
        found: str | None = value
        while found is not None:
            self._in_place[found] = target
            found = self._only_operand(target, found)
        return True

    def _may(self, target: str, value: str) -> bool:
        """Whether a value may be computed over an input that nobody reads later."""
        graph, layouts = self._graph, self._lowered.layouts
        node = graph.producers.get(value)
        if node is None or node.phase is not Phase.UPDATE or value in self._in_place:
            return False
        call = self.calls[node.name]
        storage = graph.storages[target]
        same = [name for name in node.inputs if graph.storages[name] == storage]
        first = call.args[0] == Operand(0) and node.inputs[0] == target
        return (
            call.into is not None
            and (first or not call.first)
            and graph.tensors[value].alias is None
            and layouts[value] == layouts[target]
            and graph.tensors[value].nbytes == graph.tensors[target].nbytes
            and all(name == target for name in same)
            and max(self._read.get(storage, [-1])) <= graph.positions[node.name]
        )

    def _only_operand(self, target: str, value: str) -> str | None:
        """An operand that nobody else reads, and that may be in the same place."""
        graph = self._graph
        node = graph.producers[value]
        if any(graph.storages[t] == graph.storages[target] for t in node.inputs):
            return None  # what is there is still read
        for name in node.inputs:
            alone = len(graph.readers[name]) == 1 and name not in self._times
            if alone and self._may(target, name):
                return name
        return None


def _ordered(
    graph: Graph,
    nodes: Sequence[Node],
    stores: Mapping[str, str],
    late: frozenset[str],
) -> tuple[Node, ...]:
    """Updates right behind the last node that they wait for, others as they were."""
    main = [node for node in nodes if node.phase is not Phase.UPDATE]
    rest = [node for node in nodes if node.phase is Phase.UPDATE]
    at = {node.name: i for i, node in enumerate(main)}
    storages = graph.storages
    producer = {name: node for node in nodes for name in node.outputs}
    before = _before(rest, storages, producer)
    readers: dict[str, int] = {}
    for node in main:
        for name in node.inputs:
            readers[storages[name]] = at[node.name]
    anchors: dict[str, int] = {}
    for node in rest:  # what it waits for comes first in `rest`
        waits = [anchors.get(n.name, at.get(n.name, -1)) for n in before[node.name]]
        waits += [readers.get(storages[t], -1) for t in node.mutates]
        if any(t in late for t in node.mutates):
            waits.append(len(main) - 1)
        anchors[node.name] = max(waits, default=-1)
    read = {name for node in rest for name in node.inputs}
    sinks = [n for n in rest if n.mutates and read.isdisjoint(n.outputs)]
    behind: dict[int, list[Node]] = {}
    seen = set(at)
    for sink in sorted(sinks, key=lambda node: anchors[node.name]):
        behind.setdefault(anchors[sink.name], []).extend(_with(sink, before, seen))
    last = [x for n in rest for x in _with(n, before, seen)]
    found = list(behind.get(-1, ()))
    for i, node in enumerate(main):
        found += (node, *behind.get(i, ()))
    return (*found, *last)


def _before(
    rest: Sequence[Node], storages: Mapping[str, str], producer: Mapping[str, Node]
) -> dict[str, list[Node]]:
    """For every update those nodes that it waits for: in what it reads and changes."""
    found = {}
    readers: dict[str, list[Node]] = {}
    for node in rest:
        found[node.name] = [producer[t] for t in node.inputs if t in producer]
        for target in node.mutates:
            found[node.name] += readers.get(storages[target], ())
        for name in node.inputs:
            readers.setdefault(storages[name], []).append(node)
    return found


def _with(node: Node, before: Mapping[str, list[Node]], seen: set[str]) -> list[Node]:
    """A node behind all that it waits for and that is not there yet."""
    found: list[Node] = []
    pending: list[Any] = [node]
    while pending:
        top = pending[-1]
        missing = (
            [n for n in before[top.name] if n.name not in seen]
            if (top.name not in seen)
            else []
        )
        if missing:
            pending += missing
            continue
        pending.pop()
        if top.name not in seen:
            seen.add(top.name)
            found.append(top)
    return found
