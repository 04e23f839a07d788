"""A group of nodes as one function: its inputs, its outputs, its mutations.

Views are taken inside the group where members read them, and outside where others do. A
result that only members need has no bytes of its own any more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mucudnn.ir.graph import Node
from mucudnn.ir.traits import Batch, NodeTraits
from mucudnn.passes.liveness import live_at_end, live_ranges
from mucudnn.torch.fusion.members import COPY, passes_through, used_operands
from mucudnn.torch.fusion.recipes import Recipe, Step
from mucudnn.torch.lowering.lowered import Lowered


@dataclass(frozen=True)
class Group:
    """Nodes that may become one.

    Attributes:
        members: Their names, in order.
        inputs: Tensors that the group reads or mutates.
        outputs: Tensors that it makes and others need.
        mutates: Inputs that it mutates.
        taken: The input that its first output may overwrite.
        recipe: Its computation.
        traits: Traits of the fused node.
    """

    members: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    mutates: tuple[str, ...]
    taken: int | None
    recipe: Recipe
    traits: NodeTraits

    @property
    def name(self) -> str:
        """Name of the node that it becomes."""
        return f"fused.{self.members[-1]}"

    def without_overwriting(self) -> "Group":
        """Return a copy of the group without in-place outputs."""
        return replace(self, taken=None, traits=replace(self.traits, overwrites=()))


class Grouping:
    """Makes groups of nodes of one graph."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        self._graph = lowered.graph
        self._last = {s: live.last for s, live in live_ranges(lowered.graph).items()}
        stays = live_at_end(lowered.graph) | {
            lowered.graph.storages[name] for name in lowered.graph.inputs
        }
        self._stays = frozenset(stays)
        self._asked = frozenset(
            name for name in lowered.results if isinstance(name, str)
        ) | frozenset(lowered.graph.outputs)

    def group(self, members: Sequence[Node]) -> Group | None:
        """Return nodes that share no tensor with what is between them as a group.

        Returns:
            None if they cannot be one: a mutated input is needed with its old and its
            new value, or a value that is computed in place is needed outside.
        """
        found = _Body(self._lowered, members)
        names = {node.name for node in members}
        if found.refused or any(self._outside(t, names) for t in found.overwriting):
            return None
        made = [
            t
            for node in members
            if not node.mutates
            for t in node.outputs
            if self._outside(t, names)
        ]
        if not made and not found.stores:
            return None
        taken, first = self._overwritten(members[-1], found, made)
        if first is not None:
            made = [first, *(t for t in made if t != first)]
        return Group(
            tuple(node.name for node in members),
            tuple(found.inputs),
            tuple(made),
            tuple(found.stores),
            taken,
            found.recipe(made),
            NodeTraits(
                overwrites=() if taken is None else (taken,),
                batch=_batch(members, found.inputs, made),
            ),
        )

    def _outside(self, tensor: str, members: set[str]) -> bool:
        """Return whether others than these nodes need a tensor, or a view of it."""
        if tensor in self._asked:
            return True
        for reader in self._graph.readers[tensor]:
            if reader.name in members:
                continue
            if not passes_through(self._lowered, reader):
                return True
            if any(self._outside(t, members) for t in reader.outputs):
                return True
        return False

    def _overwritten(
        self, last: Node, body: "_Body", made: Sequence[str]
    ) -> tuple[int | None, str | None]:
        """Return an input of no later use, and a result that may overwrite it."""
        graph, layouts = self._graph, self._lowered.layouts
        if body.stores:
            return None, None
        storages = [graph.storages[name] for name in body.inputs]
        end = graph.positions[last.name]
        for result in made:
            for i, name in enumerate(body.inputs):
                storage = storages[i]
                if (
                    layouts[name] == layouts[result]
                    and graph.tensors[name].nbytes == graph.tensors[result].nbytes
                    and storage not in self._stays
                    and self._last[storage] <= end
                    and storages.count(storage) == 1
                ):
                    return i, result
        return None, None


class _Body:
    """The computation of some nodes, with the views between them."""

    def __init__(self, lowered: Lowered, members: Sequence[Node]) -> None:
        self.inputs: list[str] = []
        self.stores: dict[str, str] = {}
        self.refused = False
        self._lowered = lowered
        self._made: set[str] = set()
        self._steps: list[Node] = []
        self._changed: dict[str, str] = {}  # storage -> the value that is there now
        names = {node.name for node in members}
        positions = lowered.graph.positions
        begin, end = positions[members[0].name], positions[members[-1].name]
        for node in lowered.graph.nodes[begin : end + 1]:
            if node.name in names:
                self._member(node)
            elif passes_through(lowered, node) and self._made.issuperset(node.inputs):
                self._steps.append(node)
                self._made.update(node.outputs)
        self._steps = self._needed()
        storages = lowered.graph.storages
        self.overwriting = [t for t in self._made if storages[t] in self._changed]

    def recipe(self, outputs: Sequence[str]) -> Recipe:
        """Return the computation without names."""
        layouts = self._lowered.layouts
        number = {name: i for i, name in enumerate(self.inputs)}
        steps = []
        for node in self._steps:
            operands = tuple(number.get(name, 0) for name in node.inputs)
            steps.append(Step(self._lowered.calls[node.name], operands))
            for name in node.outputs:
                number[name] = len(number)
        return Recipe(
            tuple(layouts[name] for name in self.inputs),
            tuple(steps),
            tuple(number[name] for name in outputs),
            tuple(layouts[name] for name in outputs),
            tuple(
                (number[target], number[value]) for target, value in self.stores.items()
            ),
        )

    def _member(self, node: Node) -> None:
        call, storages = self._lowered.calls[node.name], self._lowered.graph.storages
        used = used_operands((call.args, tuple(call.kwargs.values())))
        for place in sorted(used):
            name = node.inputs[place]
            if call.function is COPY and place == 0:
                continue
            if self._changed.get(storages[name], name) != name:
                self.refused = True  # the old value is overwritten
            self._input(name)
        if node.mutates:
            self._store(node, call.function is COPY)
        if call.function is not COPY:
            self._steps.append(node)
            self._made.update(node.outputs)

    def _store(self, node: Node, copies: bool) -> None:
        (target,) = node.mutates
        storages = self._lowered.graph.storages
        root = storages[target]
        if any(storages[t] == root and t != target for t in self.inputs):
            self.refused = True  # another name of it is read
        self._input(target)
        value = node.inputs[1] if copies else node.outputs[0]
        self.stores[target] = value
        self._changed[root] = "" if copies else value

    def _input(self, name: str) -> None:
        if name not in self.inputs and name not in self._made:
            self.inputs.append(name)

    def _needed(self) -> list[Node]:
        """Return all steps but views that no member reads."""
        read = set(self.stores.values())
        found = []
        for node in reversed(self._steps):
            view = passes_through(self._lowered, node)
            if view and read.isdisjoint(node.outputs):
                continue
            read.update(node.inputs)
            found.append(node)
        return found[::-1]


def _batch(
    members: Sequence[Node], inputs: Sequence[str], outputs: Sequence[str]
) -> Batch | None:
    """Return the axes along which all nodes can be split, if they agree."""
    axes: dict[str, int | None] = {}
    summed: set[str] = set()
    for node in members:
        batch = node.traits.batch
        if batch is None or batch.averaged or not summed.isdisjoint(node.inputs):
            return None
        for name, axis in zip(
            node.tensors, (*batch.inputs, *batch.outputs), strict=True
        ):
            if axes.setdefault(name, axis) != axis:
                return None
        rows = zip(node.outputs, batch.outputs, strict=True)
        summed.update(name for name, axis in rows if axis is None)
    if not set(axes).issuperset((*inputs, *outputs)):
        return None
    return Batch(tuple(axes[t] for t in inputs), tuple(axes[t] for t in outputs))
