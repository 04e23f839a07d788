"""Split a training step along an axis: nodes into slices, tensors into row ranges.

No plan can need less memory than a single node touches. A node that computes its
samples independently can run on a range of rows at a time; the rows it reads and writes
become storages of their own, with their own live ranges, offloads and recomputation.
The working set shrinks by the number of parts. This is the idea of TSPLIT (Nie et al.,
ICDE 2022), and of micro-batches for whole chains of layers instead of single
convolutions.

Nodes declare how they are split (`Batch`); cross-sample operations may be decomposed
(`pieces`); all other nodes stay whole.

Nodes are emitted in phases: runs of nodes with the same number of parts, none of which
needs a sum of the same run. Within a phase the slices of all nodes are interleaved, so
that little is alive at once. An unsplit node that reads only such sums is deferred to
the end of the phase instead of ending it. Values equal those of the whole graph up to
the order of sums; every plan of the split graph computes the same bits.
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
    """Split the nodes of a step along the batch.

    Args:
        graph: A training graph without updates, before in-place rewriting.
        parts: Number of parts of each node (1 for nodes missing in a mapping), at most
            the number of samples. Nodes that cannot be split stay whole.
        batch: Number of samples; by default the first axis of the first non-scalar
            input.

    Raises:
        ValueError: A number of parts is below 1, or the batch size is unknown.
        TypeError: A number of parts is not an integer.
    """
    return split_along(graph, parts, along_batch(graph, batch))


def split_height(graph: Graph, parts: Parts) -> Graph:
    """Split the nodes of a step along the height of images or the depth of volumes.

    A node has at most as many parts as its smallest image has rows.

    Raises:
        ValueError: A number of parts is below 1, or the graph has no images.
        TypeError: A number of parts is not an integer.
    """
    return split_along(graph, parts, along_height(graph))


def split_along(graph: Graph, parts: Parts, along: Along) -> Graph:
    """Split the nodes of a step along an axis."""
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
        """Results of the open phase that are complete only at its end."""
        self._deferred: list[Node] = []
        """Unsplit nodes that run right after the open phase."""

    def run(self) -> Graph:
        for node in self._graph.nodes:
            for cut in self._expanded(node):
                self._visit(cut)
        self._close()
        graph, slices = self._graph, self._slices
        for name in (*graph.outputs, *graph.gradients.values()):
            slices.whole(name, graph.nodes[-1].phase)
        used = {t for node in slices.nodes for t in node.tensors} | set(graph.inputs)
        used_tensors = {
            name: spec
            for name, spec in slices.tensors.items()
            if name in used or spec.role in PERSISTENT
        }
        return replace(
            graph, tensors=MappingProxyType(used_tensors), nodes=tuple(slices.nodes)
        )

    def _expanded(self, node: Node) -> Iterator[Cut]:
        """Yield a node, or its decomposition, with the parts of each."""
        parts = self._parts(node) if node.name in self._cuttable else 1
        splittable = cut_as(self._graph.tensors, node, self._along) is not None
        for piece in (node,) if splittable or parts == 1 else self._pieces(node):
            yield self._cut(piece, parts)

    def _cut(self, node: Node, parts: int) -> Cut:
        """Return a node with at most as many parts as its tensors have rows."""
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
                if self._can_defer(cut.node):
                    self._deferred.append(cut.node)
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
        """Return whether a node needs a whole tensor or a sum of the open phase."""
        axes = zip(cut.node.inputs, cut.how.inputs, strict=True)
        whole = {name for name, axis in axes if axis is None}
        made = {name for other in self._phase for name in other.node.outputs}
        return bool(whole & made or self._sums.intersection(cut.node.inputs))

    def _can_defer(self, node: Node) -> bool:
        """Return whether a node can be deferred behind the open phase."""
        storages = self._slices.storages
        made = {t for cut in self._phase for t in cut.node.outputs} - self._sums
        rows = {storages(t) for t in made}
        return not node.mutates and all(storages(t) not in rows for t in node.inputs)

    def _depends(self, node: Node) -> bool:
        """Return whether an unsplit node must run behind the open phase."""
        if not self._phase:
            return False
        storages = self._slices.storages
        nodes = [*(cut.node for cut in self._phase), *self._deferred]
        made = {storages(t) for n in nodes for t in (*n.outputs, *n.mutates)}
        if any(storages(t) in made for t in node.tensors):
            return True
        changed = {storages(t) for t in node.mutates}
        changed |= {storages(t) for t in node.outputs if storages(t) != t}
        return any(storages(t) in changed for n in nodes for t in n.inputs)

    def _close(self) -> None:
        """Emit the open phase, then the deferred nodes."""
        phase, self._phase, self._sums = self._phase, [], set()
        deferred, self._deferred = self._deferred, []
        if not phase:
            return
        self._emitter.phase(phase)
        for node in deferred:
            self._emitter.whole(node)
        self._slices.forget_copies()
