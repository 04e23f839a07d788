"""Where the batch or the height is in a lowered graph: its nodes say how to cut them.

From the tensors of a batch on, the rules of operations tell where the samples of every
result are, or the rows of its images. A tensor whose samples are stretches of its
storage has rows in the graph that the passes see, as have images whose rows are
stretches of each of its channels; of any other tensor a slice of a call reads what it
needs itself.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.strips import HEIGHT
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.ir.traits import Batch, Operands, Rows, Strip
from mucudnn.torch.lowering.lowered import Call, Lowered
from mucudnn.torch.splitting.axes import Axis, Cut, Site, Stripped, rows_in
from mucudnn.torch.splitting.batch_rules import UNDRAWN, carried, cut_of
from mucudnn.torch.splitting.strip_rules import strip_carried, strip_of

_SAMPLES = 0


@dataclass(frozen=True)
class Batched:
    """A lowered graph of which is known where the batch, or the height, is.

    Attributes:
        lowered: Its nodes say how they are cut, and tensors with rows have two axes:
            samples and bytes of one; images have two before them, one and how many
            stretches of rows there are.
        cuts: Node -> how its call is cut.
        axes: Tensor that has rows -> where they are.
    """

    lowered: Lowered
    cuts: Mapping[str, Cut]
    axes: Mapping[str, Axis]

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
    return _followed(_Following(lowered, samples), dict.fromkeys(batch, Axis(0)))


def with_strips(lowered: Lowered, images: Mapping[str, Axis]) -> Batched:
    """Follow the rows of images through a graph.

    Args:
        lowered: The graph.
        images: Its inputs that have some, and where.
    """
    return _followed(_Following(lowered, None), images)


def _followed(following: "_Following", given: Mapping[str, Axis]) -> Batched:
    lowered = following.lowered
    for name, axis in given.items():
        following.found(name, axis)
    nodes = tuple(following.visited(node) for node in lowered.graph.nodes)
    tensors = {
        name: following.shaped(spec, name in given)
        for name, spec in lowered.graph.tensors.items()
    }
    graph = replace(lowered.graph, tensors=MappingProxyType(tensors), nodes=nodes)
    return Batched(replace(lowered, graph=graph), following.cuts, following.rows)


class _Following:
    """Follows samples, of which there are so many; or rows of images, if None."""

    def __init__(self, lowered: Lowered, samples: int | None) -> None:
        self.lowered, self._samples = lowered, samples
        self._axes: dict[str, Axis] = {}
        self.rows: dict[str, Axis] = {}
        self.cuts: dict[str, Cut] = {}
        self._sliced: set[str] = set()

    def visited(self, node: Node) -> Node:
        """A node with how it is cut, if it is.

        A view of what is whole stays so: it costs nothing, and its rows are views.
        """
        site, call = self._site(node), self.lowered.calls[node.name]
        strips = self._samples is None
        cut = None
        if not node.mutates:
            cut = strip_of(site, call) if strips else cut_of(site, call)
        view = node.traits.view and self._sliced.isdisjoint(node.inputs)
        if cut is None or view or not self._cuttable(node, cut):
            if cut is not None:
                axes = cut.outputs
            else:
                axes = strip_carried(site, call) if strips else carried(site, call)
            self._follow(node, axes)
            return node
        self._follow(node, cut.outputs)
        self._sliced.update(node.outputs)
        self.cuts[node.name] = cut
        random = node.traits.random and node.op not in UNDRAWN
        traits = replace(node.traits, random=random)
        if strips:
            return replace(node, traits=replace(traits, strips=self._strips(node, cut)))
        return replace(node, traits=replace(traits, batch=self._batch(node, cut)))

    def shaped(self, spec: TensorSpec, given: bool) -> TensorSpec:
        """A tensor as passes see it."""
        axis = self.rows.get(spec.name)
        if axis is None:
            return replace(spec, shape=(1, spec.nbytes))
        found = rows_in(self.lowered.layouts[spec.name], axis, spec.nbytes)
        if found is None:
            raise AssertionError(f"{spec.name} has rows and lies otherwise")
        shape = found[1:] if self._samples is not None else (1, *found)
        return replace(spec, shape=shape, role=Role.INPUT if given else spec.role)

    def found(self, name: str, axis: Axis) -> None:
        """Samples, or rows, of a tensor are along an axis."""
        self._axes[name] = axis
        if self._has_rows(name, axis):
            self.rows[name] = axis

    def _site(self, node: Node) -> Site:
        call, layouts = self.lowered.calls[node.name], self.lowered.layouts
        inputs = tuple(layouts[name] for name in node.inputs)
        axes = tuple(self._axes.get(name) for name in node.inputs)
        batch = self._samples
        if batch is None:
            known = zip(inputs, axes, strict=True)
            rows = (lies.shape[at.index] // at.each for lies, at in known if at)
            batch = next(rows, 0)
        return Site(
            node.op,
            call.args,
            call.kwargs,
            call.results,
            inputs,
            tuple(layouts[name] for name in node.outputs),
            axes,
            batch,
        )

    def _batch(self, node: Node, cut: Cut) -> Batch:
        return Batch(*self._places(node, cut, _SAMPLES), sliced=_said)

    def _strips(self, node: Node, cut: Cut) -> Batch:
        places = self._places(node, cut, HEIGHT)
        if cut.stripped is not None:
            return Batch(*places, reach=partial(_reached, cut.stripped))
        index, axis = next(iter(cut.inputs.items()))
        layout = self.lowered.layouts[node.inputs[index]]
        size = layout.shape[axis.index] // axis.each
        gathered = tuple(range(len(cut.outputs))) if cut.gathered else ()
        said = partial(_said_of, size)
        return Batch(*places, gathered=gathered, sliced=said)

    def _places(
        self, node: Node, cut: Cut, place: int
    ) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        """Which axis of what is read, and written, passes cut."""
        read = tuple(
            place if self._reads(name, cut.inputs.get(i)) else None
            for i, name in enumerate(node.inputs)
        )
        return read, tuple(None if axis is None else place for axis in cut.outputs)

    def _follow(self, node: Node, axes: tuple[Axis | None, ...]) -> None:
        for name, axis in zip(node.outputs, axes, strict=True):
            if axis is not None:
                self.found(name, axis)

    def _has_rows(self, name: str, axis: Axis) -> bool:
        nbytes = self.lowered.graph.tensors[name].nbytes
        found = rows_in(self.lowered.layouts[name], axis, nbytes)
        if found is None or self._samples is None:
            return found is not None
        return found[:2] == (1, self._samples)

    def _cuttable(self, node: Node, cut: Cut) -> bool:
        """Whether results are rows, and so is something that is read.

        Windows reach over rows of what is there by rows alone.
        """
        tensors = self.lowered.graph.tensors
        pairs = [*zip(node.outputs, cut.outputs, strict=True)]
        if not all(axis is None or self._has_rows(name, axis) for name, axis in pairs):
            return False
        read = [
            self._reads(name, cut.inputs.get(i)) for i, name in enumerate(node.inputs)
        ]
        if sum(read) < (1 if cut.stripped is None else len(cut.inputs)):
            return False
        if any(tensors[name].alias is not None for name, axis in pairs if not axis):
            return False
        storages = self.lowered.graph.storages
        rows = {storages[n] for n, at in zip(node.inputs, read, strict=True) if at}
        aliased = (storages[n] for n in node.outputs if tensors[n].alias is not None)
        return all(storage in rows for storage in aliased)

    def _reads(self, name: str, axis: Axis | None) -> bool:
        """Whether rows are read of a tensor that is there by rows."""
        return axis is not None and self.rows.get(name) == axis


def _said(attrs: Mapping[str, Any], specs: object, rows: Rows) -> Mapping[str, Any]:
    """A slice's attributes: which samples it computes."""
    return {**attrs, "rows": rows}


def _said_of(
    size: int, attrs: Mapping[str, Any], specs: object, rows: Rows
) -> Mapping[str, Any]:
    """A strip's attributes: which of so many rows it computes."""
    return {**attrs, "rows": rows.of(size)}


def _reached(stripped: Stripped, node: Operands, rows: Rows) -> Strip:
    """What a strip reads and computes, and its call among its attributes."""
    found = stripped(rows)
    reads = tuple(found.reads.get(i) for i in range(len(node.inputs)))
    attrs: Mapping[str, Call] = {"strip": found.call}
    return Strip(reads, found.made, attrs)
