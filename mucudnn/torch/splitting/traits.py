"""Where the batch is in a lowered graph: its nodes say how they are cut.

From the tensors of a batch on, the rules of operations tell where the samples of every
result are. A tensor whose samples are stretches of its storage has rows in the graph
that the passes see; of any other tensor a slice of a call reads what it needs itself.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mucudnn.ir.graph import Graph, Node, Role, TensorSpec
from mucudnn.ir.traits import Batch, Rows
from mucudnn.torch.lowering.lowered import Lowered
from mucudnn.torch.splitting.axes import Axis, Cut, Site, in_rows
from mucudnn.torch.splitting.rules import UNDRAWN, carried, cut_of

__all__ = ["Batched", "with_batches"]


@dataclass(frozen=True)
class Batched:
    """A lowered graph of which is known where the batch is.

    Attributes:
        lowered: Its nodes say how they are cut, and tensors with rows have two axes:
            samples and bytes of one.
        cuts: Node -> how its call is cut.
        axes: Tensor that has rows -> where they are.
        samples: In the batch.
    """

    lowered: Lowered
    cuts: Mapping[str, Cut]
    axes: Mapping[str, Axis]
    samples: int

    @property
    def graph(self) -> Graph:
        """What passes work on."""
        return self.lowered.graph


def with_batches(lowered: Lowered, batch: Collection[str], samples: int) -> Batched:
    """Follow the samples of a batch through a graph.

    Args:
        lowered: The graph.
        batch: Its inputs whose first axis has the samples.
        samples: How many.
    """
    following = _Following(lowered, samples)
    for name in batch:
        following.given(name)
    nodes = tuple(following.visited(node) for node in lowered.graph.nodes)
    rows = following.rows
    tensors = {
        name: _shaped(spec, name in rows, samples, name in batch)
        for name, spec in lowered.graph.tensors.items()
    }
    graph = replace(lowered.graph, tensors=MappingProxyType(tensors), nodes=nodes)
    return Batched(replace(lowered, graph=graph), following.cuts, rows, samples)


def _shaped(spec: TensorSpec, rows: bool, samples: int, given: bool) -> TensorSpec:
    shape = (samples, spec.nbytes // samples) if rows else (1, spec.nbytes)
    role = Role.INPUT if rows and given else spec.role
    return replace(spec, shape=shape, role=role)


class _Following:
    def __init__(self, lowered: Lowered, samples: int) -> None:
        self._lowered, self._samples = lowered, samples
        self._axes: dict[str, Axis] = {}
        self.rows: dict[str, Axis] = {}
        self.cuts: dict[str, Cut] = {}
        self._sliced: set[str] = set()

    def given(self, name: str) -> None:
        """A tensor of the batch."""
        self._found(name, Axis(0))

    def visited(self, node: Node) -> Node:
        """A node with how it is cut, if it is.

        A view of what is whole stays so: it costs nothing, and its rows are views.
        """
        call = self._lowered.calls[node.name]
        layouts = self._lowered.layouts
        site = Site(
            node.op,
            call.args,
            call.kwargs,
            call.results,
            tuple(layouts[name] for name in node.inputs),
            tuple(layouts[name] for name in node.outputs),
            tuple(self._axes.get(name) for name in node.inputs),
            self._samples,
        )
        cut = None if node.mutates else cut_of(site, call)
        view = node.traits.view and self._sliced.isdisjoint(node.inputs)
        if cut is None or view or not self._cuttable(node, cut):
            axes = carried(site, call) if cut is None else cut.outputs
            self._follow(node, axes)
            return node
        self._follow(node, cut.outputs)
        self._sliced.update(node.outputs)
        self.cuts[node.name] = cut
        read = (
            self._read(name, cut.inputs.get(i)) for i, name in enumerate(node.inputs)
        )
        written = (None if axis is None else 0 for axis in cut.outputs)
        batch = Batch(tuple(read), tuple(written), sliced=_said)
        random = node.traits.random and node.op not in UNDRAWN
        traits = replace(node.traits, batch=batch, random=random)
        return replace(node, traits=traits)

    def _follow(self, node: Node, axes: tuple[Axis | None, ...]) -> None:
        for name, axis in zip(node.outputs, axes, strict=True):
            if axis is not None:
                self._found(name, axis)

    def _found(self, name: str, axis: Axis) -> None:
        self._axes[name] = axis
        if self._has_rows(name, axis):
            self.rows[name] = axis

    def _has_rows(self, name: str, axis: Axis) -> bool:
        spec, layout = self._lowered.graph.tensors[name], self._lowered.layouts[name]
        return in_rows(layout, axis, spec.nbytes, self._samples)

    def _cuttable(self, node: Node, cut: Cut) -> bool:
        """Whether results are rows, and so is something that is read."""
        tensors = self._lowered.graph.tensors
        pairs = zip(node.outputs, cut.outputs, strict=True)
        if not all(axis is None or self._has_rows(name, axis) for name, axis in pairs):
            return False
        read = [
            self._read(name, cut.inputs.get(i)) for i, name in enumerate(node.inputs)
        ]
        if all(axis is None for axis in read):
            return False
        sums = [
            n for n, axis in zip(node.outputs, cut.outputs, strict=True) if not axis
        ]
        if any(tensors[name].alias is not None for name in sums):
            return False
        storages = self._lowered.graph.storages
        rows = {storages[n] for n, at in zip(node.inputs, read, strict=True) if at == 0}
        aliased = (storages[n] for n in node.outputs if tensors[n].alias is not None)
        return all(storage in rows for storage in aliased)

    def _read(self, name: str, axis: Axis | None) -> int | None:
        return 0 if axis is not None and self.rows.get(name) == axis else None


def _said(attrs: Mapping[str, Any], specs: object, rows: Rows) -> Mapping[str, Any]:
    """A slice's attributes: which samples it computes."""
    return {**attrs, "rows": rows}
