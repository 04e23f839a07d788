"""Cut a training step along the batch: every node into slices, every tensor into rows.

No planner can need less than what one node touches at once. A node that computes its
samples one by one runs on some rows of the batch at a time; what it reads and writes of
them are storages of their own, which live, leave and are computed again on their own.
So the working set shrinks by the number of parts. The idea of TSPLIT (Nie et al., ICDE
2022), and of micro-batches for whole chains of layers instead of single convolutions.

Nodes say themselves how they are cut (`Batch`); one whose samples depend on each other
may fall into pieces that can (`pieces`); all others stay whole. What sums over the
batch is summed slice by slice, in place, and the last sum has the tensor's own name.

Order is by phases: runs of nodes that are cut into the same number of parts and in
which none needs a sum that the same run makes. A phase is emitted slice by slice, so
that little is alive at once. A node that is not cut and reads only such sums waits for
the end of the phase instead of ending it. Values are those of the whole graph up to the
order of sums; whatever is planned for the split graph then computes the same bits.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from mucudnn.arguments import an_integer
from mucudnn.ir.graph import PERSISTENT, Graph, Node, Role, TensorSpec
from mucudnn.ir.operations import make_node
from mucudnn.ir.tensor import INTEGERS, ITEMSIZE
from mucudnn.ir.traits import Batch, Operands
from mucudnn.passes.graph.split_slices import Slices

__all__ = ["Parts", "batch_of", "cut_as", "cuttable", "split_batch"]

_WHOLE = Batch((), ())

Parts = Mapping[str, int] | Callable[[Node], int] | int
"""Into how many parts nodes are cut: each by its name, by a function, or all alike."""


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
    samples = batch_of(graph) if batch is None else an_integer("batch", batch, least=1)
    return _Splitter(graph, _asked(parts), samples).run()


def batch_of(graph: Graph) -> int:
    """Samples of a graph: the first axis of its first input that has one.

    Raises:
        ValueError: No input has an axis.
    """
    for spec in graph.with_role(Role.INPUT):
        if spec.shape:
            return spec.shape[0]
    raise ValueError("no input of the graph has a batch; say how many samples it has")


def cuttable(graph: Graph, batch: int) -> frozenset[str]:
    """Nodes that can be cut, as they are or in pieces, and read something of the batch.

    What follows from weights alone has rows as well, but none for each sample.
    """
    carrying = {
        spec.name
        for spec in graph.with_role(Role.INPUT, Role.BORROWED)
        if spec.shape[:1] == (batch,)
    }
    found = set()
    for node in graph.nodes:
        fed = [name for name in node.inputs if name in carrying]
        if not fed:
            continue
        how = cut_as(graph.tensors, node, batch)
        if how is not None:
            axes = zip(node.inputs, how.inputs, strict=True)
            if any(axis is not None and name in carrying for name, axis in axes):
                found.add(node.name)
        elif node.traits.pieces is not None:
            found.add(node.name)
        lengths = {graph.tensors[name].shape[:1] for name in fed}
        carrying.update(
            name for name in node.outputs if graph.tensors[name].shape[:1] in lengths
        )
    return frozenset(found)


def cut_as(tensors: Mapping[str, TensorSpec], node: Node, batch: int) -> Batch | None:
    """How a node is cut; None if it stays whole.

    Rows must be bytes in a row: the batch is the slowest axis of dense tensors.
    """
    how = node.traits.batch
    if how is None or (how.averaged and how.sliced is None):
        return None
    axes = (*how.inputs, *how.outputs)
    if not any(axis is not None for axis in axes):
        return None
    for name, axis in zip(node.tensors, axes, strict=True):
        if axis is not None and not (axis == 0 and _in_rows(tensors[name], batch)):
            return None
    return how


def _in_rows(spec: TensorSpec, batch: int) -> bool:
    if not spec.shape or spec.shape[0] % batch:
        return False
    known = spec.dtype in ITEMSIZE or spec.dtype in INTEGERS
    dense = replace(spec, storage_bytes=None)
    return known and dense.nbytes == spec.nbytes


def _asked(parts: Parts) -> Callable[[Node], int]:
    if isinstance(parts, Mapping):
        for number in parts.values():
            an_integer("parts", number, least=1)
        return lambda node: parts.get(node.name, 1)
    if callable(parts):
        return lambda node: an_integer("parts", parts(node), least=1)
    number = an_integer("parts", parts, least=1)
    return lambda node: number


@dataclass(frozen=True, slots=True)
class _Cut:
    """A node, or a piece of one, and into how many parts it is cut."""

    node: Node
    parts: int
    how: Batch


class _Splitter:
    def __init__(self, graph: Graph, parts: Callable[[Node], int], batch: int) -> None:
        self._graph, self._parts, self._batch = graph, parts, batch
        self._cuttable = cuttable(graph, batch)
        self._slices = Slices(graph, batch)
        self._phase: list[_Cut] = []
        self._sums: set[str] = set()
        """Results of the open phase that are there only when it is closed."""
        self._late: list[Node] = []
        """Whole nodes that run behind the open phase."""
        self._totals: dict[str, str] = {}
        """Result that is a sum -> the sum of the slices so far."""

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

    def _expanded(self, node: Node) -> Iterator[_Cut]:
        """A node, or what it falls into, with the parts of each."""
        asked = self._parts(node) if node.name in self._cuttable else 1
        parts = min(asked, self._batch)
        if parts > 1 and node.traits.pieces is not None:
            for piece in self._pieces(node):
                how = cut_as(self._slices.tensors, piece, self._batch)
                yield _Cut(piece, parts, how) if how else _Cut(piece, 1, _WHOLE)
            return
        how = cut_as(self._graph.tensors, node, self._batch) if parts > 1 else None
        yield _Cut(node, parts, how) if how else _Cut(node, 1, _WHOLE)

    def _pieces(self, node: Node) -> Iterator[Node]:
        make, tensors = node.traits.pieces, self._graph.tensors
        if make is None:
            return
        inputs = tuple(tensors[name] for name in node.inputs)
        outputs = tuple(tensors[name] for name in node.outputs)
        between, pieces = make(Operands(node.name, inputs, outputs, node.attrs))
        self._slices.tensors.update((spec.name, spec) for spec in between)
        for piece in pieces:
            yield Node(
                f"{node.name}:{piece.name}",
                piece.op,
                piece.inputs,
                piece.outputs,
                MappingProxyType(dict(piece.attrs)),
                node.phase,
                piece.mutates,
                piece.traits,
            )

    def _visit(self, cut: _Cut) -> None:
        if cut.parts == 1:
            if self._depends(cut.node):
                if self._waits(cut.node):
                    self._late.append(cut.node)
                    self._sums.update(cut.node.outputs)
                    return
                self._close()
            self._emit_whole(cut.node)
            return
        differs = bool(self._phase) and self._phase[-1].parts != cut.parts
        if differs or self._incomplete(cut):
            self._close()
        self._phase.append(cut)
        outputs = zip(cut.node.outputs, cut.how.outputs, strict=True)
        self._sums.update(name for name, axis in outputs if axis is None)

    def _incomplete(self, cut: _Cut) -> bool:
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
        """Emit the open phase, slice by slice."""
        phase, self._phase, self._sums = self._phase, [], set()
        late, self._late = self._late, []
        if not phase:
            return
        for index in range(phase[0].parts):
            for cut in phase:
                self._emit_slice(cut, index)
        for node in late:
            self._emit_whole(node)

    def _emit_whole(self, node: Node) -> None:
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

    def _emit_slice(self, cut: _Cut, index: int) -> None:
        node, how, slices = cut.node, cut.how, self._slices
        rows = slices.rows(cut.parts, index)
        inputs = [
            slices.whole(name, node.phase)
            if axis is None
            else slices.read(name, rows, node.phase)
            for name, axis in zip(node.inputs, how.inputs, strict=True)
        ]
        specs = [slices.tensors[name] for name in node.inputs]
        attrs = node.attrs
        if how.sliced is not None:
            attrs = MappingProxyType(dict(how.sliced(attrs, specs, rows)))
        outputs, added = [], []
        for position, axis in enumerate(how.outputs):
            name = node.outputs[position]
            if axis is not None:
                outputs.append(slices.write(name, rows, index, node, inputs))
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
                attrs=attrs,
                traits=replace(node.traits, batch=None),
            )
        )
        for name in added:
            self._add(name, cut, index)

    def _accumulate(self, name: str, cut: _Cut, index: int, inputs: list[str]) -> str:
        """A sum that the node itself adds to: what there is of it is an input."""
        before = self._totals.get(name)
        if before is not None:
            inputs.append(before)
        return self._total(name, cut, index, before)

    def _add(self, name: str, cut: _Cut, index: int) -> None:
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
            replace(added, traits=replace(added.traits, batch=None, joint=False))
        )

    def _total(self, name: str, cut: _Cut, index: int, before: str | None) -> str:
        """The sum up to a slice; behind the last it is the tensor itself."""
        total = name if index == cut.parts - 1 else f"{name}@0+{index}"
        self._totals[name] = total
        self._slices.declare(name, total, alias=before)
        return total
