"""The nodes of a split graph: slices of a phase line by line, others whole.

What sums over the batch is summed slice by slice, in place, and the last sum has the
tensor's own name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mucudnn.ir.graph import Node
from mucudnn.ir.operations import make_node
from mucudnn.ir.traits import Batch, Interval, Operands, Strip
from mucudnn.passes.graph.slicing.order import line_by_line
from mucudnn.passes.graph.slicing.rows import Slices

__all__ = ["Cut", "Emitter"]


@dataclass(frozen=True, slots=True)
class Cut:
    """A node, or a piece of one, and into how many parts it is cut."""

    node: Node
    parts: int
    how: Batch


class Emitter:
    """Adds nodes to a split graph.

    Args:
        slices: Its nodes and tensors so far.
    """

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._totals: dict[str, str] = {}
        """Result that is a sum -> the sum of the slices so far."""

    def phase(self, phase: Sequence[Cut]) -> None:
        """Nodes that are cut into as many parts each, slice by slice."""
        strips = [
            [self._strip(cut, index) for index in range(cut.parts)] for cut in phase
        ]
        reads = [
            [_ends(cut.node.inputs, strip.inputs) for strip in of_node]
            for cut, of_node in zip(phase, strips, strict=True)
        ]
        for position, index in line_by_line(reads, [self._made(cut) for cut in phase]):
            self._slice(phase[position], index, strips[position][index])

    def whole(self, node: Node) -> None:
        """A node as it is, on whole tensors."""
        inputs = tuple(
            found
            for name in node.inputs
            for found in self._slices.gathered(name, node.phase)
        )
        for name in node.outputs:
            self._slices.realias(name, node, inputs)
        if inputs != node.inputs:
            mutates = tuple(name for name in node.mutates if name in inputs)
            node = replace(node, inputs=inputs, mutates=mutates)
        self._slices.nodes.append(node)

    def _made(self, cut: Cut) -> Mapping[str, list[int]]:
        """Where each slice of each result ends."""
        found = {}
        for name, axis in zip(cut.node.outputs, cut.how.outputs, strict=True):
            if axis is not None:
                size = self._slices.tensors[name].shape[axis]
                slices = (self._slices.rows(cut.parts, i) for i in range(cut.parts))
                found[name] = [rows.of(size).stop for rows in slices]
        return found

    def _strip(self, cut: Cut, index: int) -> Strip:
        """What a slice of a node reads and computes."""
        node, how, tensors = cut.node, cut.how, self._slices.tensors
        rows = self._slices.rows(cut.parts, index)
        inputs = tuple(tensors[name] for name in node.inputs)
        if how.reach is not None:
            outputs = tuple(tensors[name] for name in node.outputs)
            return how.reach(Operands(node.name, inputs, outputs, node.attrs), rows)
        axes = zip(inputs, how.inputs, strict=True)
        reads = tuple(
            None if axis is None else rows.of(spec.shape[axis]).interval
            for spec, axis in axes
        )
        attrs = node.attrs
        if how.sliced is not None:
            attrs = how.sliced(attrs, inputs, rows)
        return Strip(reads, None, attrs)

    def _slice(self, cut: Cut, index: int, strip: Strip) -> None:
        node, how, slices = cut.node, cut.how, self._slices
        rows = slices.rows(cut.parts, index)
        reads = zip(node.inputs, strip.inputs, how.inputs, strict=True)
        inputs = [
            slices.whole(name, node.phase)
            if axis is None or interval is None
            else slices.read(name, axis, interval, node.phase)
            for name, interval, axis in reads
        ]
        outputs, added = [], []
        for position, axis in enumerate(how.outputs):
            name = node.outputs[position]
            if axis is not None:
                wanted = rows.of(slices.tensors[name].shape[axis]).interval
                outputs.append(slices.write(name, axis, wanted, index, strip.made))
                slices.realias(outputs[-1], node, inputs)
            elif position in how.gathered:
                outputs.append(slices.gather(name, index))
            elif how.accumulates:
                outputs.append(self._accumulate(name, cut, index, inputs))
            else:
                outputs.append(slices.partial(name, index))
                added.append(name)
        slices.nodes.append(
            replace(
                node,
                name=f"{node.name}@{index}",
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                attrs=MappingProxyType(dict(strip.attrs)),
                traits=replace(node.traits, batch=None, strips=None),
            )
        )
        slices.crop(node.phase)
        for name in added:
            self._add(name, cut, index)

    def _accumulate(self, name: str, cut: Cut, index: int, inputs: list[str]) -> str:
        """A sum that the node itself adds to: what there is of it is an input."""
        before = self._totals.get(name)
        if before is not None:
            inputs.append(before)
        return self._total(name, cut, index, before)

    def _add(self, name: str, cut: Cut, index: int) -> None:
        """Add what a slice has left to the sum of those before it, in place."""
        mine, before = f"{name}@{index}", self._totals.get(name)
        if before is None:
            self._totals[name] = mine
            return
        total = self._total(name, cut, index, before)
        node = cut.node
        added = make_node(
            self._slices.tensors,
            f"{node.name}@{index}:{name}",
            "add",
            (before, mine),
            (total,),
            phase=node.phase,
        )
        self._slices.nodes.append(
            replace(
                added,
                traits=replace(added.traits, batch=None, strips=None, joint=False),
            )
        )

    def _total(self, name: str, cut: Cut, index: int, before: str | None) -> str:
        """The sum up to a slice; behind the last it is the tensor itself."""
        total = name if index == cut.parts - 1 else f"{name}@0+{index}"
        self._totals[name] = total
        self._slices.declare(name, total, alias=before)
        return total


def _ends(
    names: tuple[str, ...], rows: tuple[Interval | None, ...]
) -> Mapping[str, int]:
    """Tensor -> the row before which a slice reads of it."""
    found: dict[str, int] = {}
    for name, part in zip(names, rows, strict=True):
        if part is not None:
            found[name] = max(part[1], found.get(name, 0))
    return found
