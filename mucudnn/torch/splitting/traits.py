"""Follow the split axis through a lowered graph, and set traits that tell how to cut.

From the tensors of a batch on, the rules of operations give the split axis of every
result. A tensor has rows in the graph that the passes see if its samples are contiguous
runs of its storage, or if the rows of images are, in each of their channels. Of any
other tensor a slice of a call narrows what it needs itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mucudnn.ir.graph import Node
from mucudnn.ir.strips import HEIGHT
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.ir.traits import Batch, Operands, Rows, Strip
from mucudnn.torch.lowering.lowered import Call, Lowered
from mucudnn.torch.splitting.axes import Axis, Cut, Site, Stripped, rows_in
from mucudnn.torch.splitting.batch_rules import UNDRAWN, carried, cut_of
from mucudnn.torch.splitting.strip_rules import strip_carried, strip_of

_SAMPLES = 0


@dataclass(frozen=True)
class SplittableStep:
    """A lowered graph that can be cut along the batch or the height.

    Attributes:
        lowered: The traits of its nodes tell how they are cut. Tensors with rows have
            two axes, samples and bytes of one; images have two axes before them, of
            size one and of the number of runs (see `rows_in`).
        cuts: Node -> how its call is cut.
        axes: Tensor that has rows -> its split axis.
    """

    lowered: Lowered
    cuts: Mapping[str, Cut]
    axes: Mapping[str, Axis]


def follow_rows(
    lowered: Lowered, inputs: Mapping[str, Axis], samples: int | None
) -> SplittableStep:
    """Follow the split axis of some inputs through a graph.

    `samples` is their number along the batch; None to follow the rows of images.
    """
    follower = _Follower(lowered, samples)
    for name, axis in inputs.items():
        follower.set_axis(name, axis)
    nodes = tuple(follower.visit(node) for node in lowered.graph.nodes)
    tensors = {
        name: follower.spec(spec, name in inputs)
        for name, spec in lowered.graph.tensors.items()
    }
    graph = replace(lowered.graph, tensors=tensors, nodes=nodes)
    return SplittableStep(replace(lowered, graph=graph), follower.cuts, follower.rows)


class _Follower:
    """See `follow_rows`.

    Attributes:
        rows: Split axis of the tensors that have rows in the passes' graph.
        cuts: Node -> how its call is cut.
    """

    def __init__(self, lowered: Lowered, samples: int | None) -> None:
        self.rows: dict[str, Axis] = {}
        self.cuts: dict[str, Cut] = {}
        self._lowered, self._samples = lowered, samples
        self._axes: dict[str, Axis] = {}
        self._sliced: set[str] = set()

    def set_axis(self, name: str, axis: Axis) -> None:
        """Note the split axis of a tensor."""
        self._axes[name] = axis
        if self._has_rows(name, axis):
            self.rows[name] = axis

    def visit(self, node: Node) -> Node:
        """Return a node with traits that tell how it is cut, if it can be.

        A view of an uncut tensor stays whole: it costs nothing, and row ranges of it
        are views.
        """
        site, call = self._site(node), self._lowered.calls[node.name]
        strips = self._samples is None
        cut = None
        if not node.mutates:
            cut = strip_of(site, call) if strips else cut_of(site, call)
        view = node.traits.view and self._sliced.isdisjoint(node.inputs)
        # Uncut nodes may pass the axis of their operands on to other nodes.
        if cut is None:
            axes = strip_carried(site, call) if strips else carried(site, call)
        else:
            axes = cut.outputs
        whole = cut is None or view or not self._cuttable(node, cut)
        for name, axis in zip(node.outputs, axes, strict=True):
            if axis is not None:
                self.set_axis(name, axis)
        if cut is None or whole:
            return node
        self._sliced.update(node.outputs)
        self.cuts[node.name] = cut
        random = node.traits.random and node.op not in UNDRAWN
        if strips:
            traits = replace(node.traits, random=random, strips=self._strips(node, cut))
        else:
            batch = Batch(
                *self._places(node, cut, _SAMPLES), sliced=partial(_with_rows, None)
            )
            traits = replace(node.traits, random=random, batch=batch)
        return replace(node, traits=traits)

    def spec(self, spec: TensorSpec, given: bool) -> TensorSpec:
        """Return a tensor as passes see it; `given` ones become inputs."""
        axis = self.rows.get(spec.name)
        if axis is None:
            return replace(spec, shape=(1, spec.nbytes))
        found = rows_in(self._lowered.layouts[spec.name], axis, spec.nbytes)
        if found is None:
            raise AssertionError(f"{spec.name} has rows in another layout")
        shape = found[1:] if self._samples is not None else (1, *found)
        return replace(spec, shape=shape, role=Role.INPUT if given else spec.role)

    def _site(self, node: Node) -> Site:
        call, layouts = self._lowered.calls[node.name], self._lowered.layouts
        inputs = tuple(layouts[name] for name in node.inputs)
        axes = tuple(self._axes.get(name) for name in node.inputs)
        batch = self._samples
        # Strips have no number of samples: count the rows of an operand instead.
        if batch is None:
            known = zip(inputs, axes, strict=True)
            rows = (layout.shape[at.index] // at.each for layout, at in known if at)
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

    def _strips(self, node: Node, cut: Cut) -> Batch:
        places = self._places(node, cut, HEIGHT)
        if cut.stripped is not None:
            return Batch(*places, reach=partial(_strip, cut.stripped))
        index, axis = next(iter(cut.inputs.items()))
        layout = self._lowered.layouts[node.inputs[index]]
        size = layout.shape[axis.index] // axis.each
        gathered = tuple(range(len(cut.outputs))) if cut.gathered else ()
        return Batch(*places, gathered=gathered, sliced=partial(_with_rows, size))

    def _places(
        self, node: Node, cut: Cut, place: int
    ) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        """Return the axis of the passes' graph of each operand and result to cut."""
        read = tuple(
            place if self._reads_rows(name, cut.inputs.get(i)) else None
            for i, name in enumerate(node.inputs)
        )
        return read, tuple(None if axis is None else place for axis in cut.outputs)

    def _has_rows(self, name: str, axis: Axis) -> bool:
        nbytes = self._lowered.graph.tensors[name].nbytes
        found = rows_in(self._lowered.layouts[name], axis, nbytes)
        if found is None or self._samples is None:
            return found is not None
        return found[:2] == (1, self._samples)

    def _cuttable(self, node: Node, cut: Cut) -> bool:
        """Return whether the passes can cut a node as a rule says."""
        tensors, storages = self._lowered.graph.tensors, self._lowered.graph.storages
        pairs = [*zip(node.outputs, cut.outputs, strict=True)]
        # All results that are cut have rows.
        if not all(axis is None or self._has_rows(name, axis) for name, axis in pairs):
            return False
        # Some operand is read by rows. Windows overlap, so a rule for strips needs rows
        # of every operand that it cuts.
        read = [
            self._reads_rows(name, cut.inputs.get(i))
            for i, name in enumerate(node.inputs)
        ]
        if sum(read) < (1 if cut.stripped is None else len(cut.inputs)):
            return False
        # Results that are views are cut, and are views of operands that are cut.
        if any(tensors[name].alias is not None for name, axis in pairs if not axis):
            return False
        rows = {storages[n] for n, at in zip(node.inputs, read, strict=True) if at}
        aliased = (storages[n] for n in node.outputs if tensors[n].alias is not None)
        return all(storage in rows for storage in aliased)

    def _reads_rows(self, name: str, axis: Axis | None) -> bool:
        """Return whether a slice reads a tensor by rows of the passes' graph."""
        return axis is not None and self.rows.get(name) == axis


def _with_rows(
    size: int | None, attrs: Mapping[str, Any], specs: object, rows: Rows
) -> Mapping[str, Any]:
    """Return the attributes of a slice, or of a strip of `size` rows, with its rows."""
    return {**attrs, "rows": rows if size is None else rows.of(size)}


def _strip(stripped: Stripped, node: Operands, rows: Rows) -> Strip:
    """Return the rows that a strip reads and computes, and its call as an attribute."""
    found = stripped(rows)
    reads = tuple(found.reads.get(i) for i in range(len(node.inputs)))
    attrs: Mapping[str, Call] = {"strip": found.call}
    return Strip(reads, found.made, attrs)
