"""Cut a training step along an axis: every node into slices, every tensor into rows.

No planner can need less than what one node touches at once. A node that computes its
samples one by one runs on some rows of the batch at a time; what it reads and writes of
them are storages of their own, which live, leave and are computed again on their own.
So the working set shrinks by the number of parts. The idea of TSPLIT (Nie et al., ICDE
2022), and of micro-batches for whole chains of layers instead of single convolutions.

Nodes say themselves how they are cut (`Batch`); one whose samples depend on each other
may fall into pieces that can (`pieces`); all others stay whole.

Order is by phases: runs of nodes that are cut into the same number of parts and in
which none needs a sum that the same run makes. A phase is emitted slice by slice, of
each node as far ahead as those behind it reach, so that little is alive at once. A node
that is not cut and reads only such sums waits for the end of the phase instead of
ending it. Values are those of the whole graph up to the order of sums; whatever is
planned for the split graph then computes the same bits.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.graph import PERSISTENT, Graph, Node
from mucudnn.ir.traits import Batch
from mucudnn.passes.graph.pieces import pieces_of
from mucudnn.passes.graph.slicing.axis import (
    SAMPLES,
    Along,
    along_batch,
    along_height,
    cut_as,
    cuttable,
)
from mucudnn.passes.graph.slicing.emission import Cut, Emitter
from mucudnn.passes.graph.slicing.parts import Parts, asked_of
from mucudnn.passes.graph.slicing.rows import Slices

__all__ = ["split_along", "split_batch", "split_height"]

_WHOLE = Batch((), ())


def split_batch(graph: Graph, parts: Parts, *, batch: int | None = None) -> Graph:
    """The same step with its nodes cut along the batch.

    Args:
        graph: A training graph without updates that nothing has made in-place yet.
        parts: How many for each node; 1 for what a mapping leaves out. No more than
            there are samples are made, and what cannot be cut stays whole.
        batch: Samples in it; by default the first axis of its first input that has one.

    Raises:
        ValueError: A number of parts is below 1, or the graph's batch is not known.
        TypeError: It is no whole number.
    """
    return split_along(graph, parts, along_batch(graph, batch))


def split_height(graph: Graph, parts: Parts) -> Graph:
    """The same step with its nodes cut along the height of images, depth of volumes.

    No more parts of a node are made than the smallest of its images has rows.

    Raises:
        ValueError: A number of parts is below 1, or the graph has no images.
        TypeError: It is no whole number.
    """
    return split_along(graph, parts, along_height(graph))


def split_along(graph: Graph, parts: Parts, along: Along) -> Graph:
    """The same step with its nodes cut along an axis."""
    return _Splitter(graph, asked_of(parts), along).run()


class _Splitter:
    def __init__(
        self, graph: Graph, parts: Callable[[Node], int], along: Along
    ) -> None:
        self._graph, self._parts, self._along = graph, parts, along
        self._cuttable = cuttable(graph, along)
        self._slices = Slices(graph, along.unit)
        self._emitter = Emitter(self._slices)
        self._phase: list[Cut] = []
        self._sums: set[str] = set()
        """Results of the open phase that are there only when it is closed."""
        self._late: list[Node] = []
        """Whole nodes that run behind the open phase."""

    def run(self) -> Graph:
        for node in self._graph.nodes:
            for cut in self._expanded(node):
                self._visit(cut)
        self._close()
        graph, slices = self._graph, self._slices
        for name in (*graph.outputs, *graph.gradients.values()):
            slices.whole(name, graph.nodes[-1].phase)
        used = {t for node in slices.nodes for t in node.tensors} | set(graph.inputs)
        kept = {
            name: spec
            for name, spec in slices.tensors.items()
            if name in used or spec.role in PERSISTENT
        }
        return replace(graph, tensors=MappingProxyType(kept), nodes=tuple(slices.nodes))

    def _expanded(self, node: Node) -> Iterator[Cut]:
        """A node, or what it falls into, with the parts of each."""
        parts = self._parts(node) if node.name in self._cuttable else 1
        able = cut_as(self._graph.tensors, node, self._along) is not None
        for piece in (node,) if able or parts == 1 else self._pieces(node):
            yield self._cut(piece, parts)

    def _cut(self, node: Node, parts: int) -> Cut:
        """A node in no more parts than what it works on has rows."""
        tensors = self._slices.tensors
        how = cut_as(tensors, node, self._along) if parts > 1 else None
        if how is None:
            return Cut(node, 1, _WHOLE)
        most = self._along.size
        if self._along.axis != SAMPLES:
            axes = zip(node.tensors, (*how.inputs, *how.outputs), strict=True)
            rows = (tensors[t].shape[axis] for t, axis in axes if axis is not None)
            most = min(rows)
        return Cut(node, min(parts, most), how) if most > 1 else Cut(node, 1, _WHOLE)

    def _pieces(self, node: Node) -> tuple[Node, ...]:
        between, pieces = pieces_of(self._graph.tensors, node)
        self._slices.tensors.update((spec.name, spec) for spec in between)
        return pieces

    def _visit(self, cut: Cut) -> None:
        if cut.parts == 1:
            if self._depends(cut.node):
                if self._waits(cut.node):
                    self._late.append(cut.node)
                    self._sums.update(cut.node.outputs)
                    return
                self._close()
            self._emitter.whole(cut.node)
            return
        differs = bool(self._phase) and self._phase[-1].parts != cut.parts
        if differs or self._incomplete(cut):
            self._close()
        self._phase.append(cut)
        outputs = zip(cut.node.outputs, cut.how.outputs, strict=True)
        self._sums.update(name for name, axis in outputs if axis is None)

    def _incomplete(self, cut: Cut) -> bool:
        """Whether a node needs as one what the open phase has made of some rows."""
        axes = zip(cut.node.inputs, cut.how.inputs, strict=True)
        whole = {name for name, axis in axes if axis is None}
        made = {name for other in self._phase for name in other.node.outputs}
        return bool(whole & made or self._sums.intersection(cut.node.inputs))

    def _waits(self, node: Node) -> bool:
        """Whether it can run behind the open phase: it needs sums, and no rows."""
        storages = self._slices.storages
        made = {t for cut in self._phase for t in cut.node.outputs} - self._sums
        rows = {storages(t) for t in made}
        return not node.mutates and all(storages(t) not in rows for t in node.inputs)

    def _depends(self, node: Node) -> bool:
        """Whether a whole node must come behind the open phase."""
        if not self._phase:
            return False
        storages = self._slices.storages
        nodes = [*(cut.node for cut in self._phase), *self._late]
        made = {storages(t) for n in nodes for t in (*n.outputs, *n.mutates)}
        if any(storages(t) in made for t in node.tensors):
            return True
        changed = {storages(t) for t in node.mutates}
        changed |= {storages(t) for t in node.outputs if storages(t) != t}
        return any(storages(t) in changed for n in nodes for t in n.inputs)

    def _close(self) -> None:
        """Emit the open phase, then what waits for its end."""
        phase, self._phase, self._sums = self._phase, [], set()
        late, self._late = self._late, []
        if not phase:
            return
        self._emitter.phase(phase)
        for node in late:
            self._emitter.whole(node)
        self._slices.forget_copies()
