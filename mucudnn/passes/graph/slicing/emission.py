"""Emit the nodes of a split graph: slices of a phase interleaved, other nodes whole.

Sums over the batch are accumulated slice by slice, in place; the last sum has the
tensor's own name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mucudnn.ir.graph import Node
from mucudnn.ir.operations import make_node
from mucudnn.ir.traits import Batch, Interval, Operands, Strip
from mucudnn.passes.graph.slicing.order import interleave_slices
from mucudnn.passes.graph.slicing.rows import Slices

__all__ = ["Cut", "Emitter"]


@dataclass(frozen=True, slots=True)
class Cut:
    """A node, or a piece of a decomposed one, and its number of parts."""

    node: Node
    parts: int
    how: Batch


class Emitter:
    """Emitter of the nodes of a split graph into `slices`."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._totals: dict[str, str] = {}
        """Name of the running sum of each result that is accumulated."""

    def phase(self, phase: Sequence[Cut]) -> None:
        """Emit nodes with the same number of parts, slice by slice."""
        strips = [
            [self._strip(cut, index) for index in range(cut.parts)] for cut in phase
        ]
        reads = [
            [_ends(cut.node.inputs, strip.inputs) for strip in of_node]
            for cut, of_node in zip(phase, strips, strict=True)
        ]
        ends = [self._slice_ends(cut) for cut in phase]
        for position, index in interleave_slices(reads, ends):
            self._slice(phase[position], index, strips[position][index])

    def whole(self, node: Node) -> None:
        """Emit a node unsplit, on whole tensors."""
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

    def _slice_ends(self, cut: Cut) -> Mapping[str, list[int]]:
        """Return the last row (exclusive) of each slice of each result."""
        found = {}
        for name, axis in zip(cut.node.outputs, cut.how.outputs, strict=True):
            if axis is not None:
                size = self._slices.tensors[name].shape[axis]
                slices = (self._slices.rows(cut.parts, i) for i in range(cut.parts))
                found[name] = [rows.of(size).stop for rows in slices]
        return found

    def _strip(self, cut: Cut, index: int) -> Strip:
        """Return the rows that a slice of a node reads and computes."""
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
        """Declare a sum that the node accumulates; the sum so far is an input."""
        before = self._totals.get(name)
        if before is not None:
            inputs.append(before)
        return self._total(name, cut, index, before)

    def _add(self, name: str, cut: Cut, index: int) -> None:
        """Emit the in-place addition of a slice's result to the sum so far."""
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
        """Declare the sum up to a slice; up to the last it is the tensor itself."""
        total = name if index == cut.parts - 1 else f"{name}@0+{index}"
        self._totals[name] = total
        self._slices.declare(name, total, alias=before)
        return total


def _ends(
    names: tuple[str, ...], rows: tuple[Interval | None, ...]
) -> Mapping[str, int]:
    """Return the last row (exclusive) that a slice reads of each tensor."""
    found: dict[str, int] = {}
    for name, part in zip(names, rows, strict=True):
        if part is not None:
            found[name] = max(part[1], found.get(name, 0))
    return found
