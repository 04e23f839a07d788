"""Cut a training step along one axis: nodes into slices, tensors into rows.

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

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mucudnn.ir.graph import PERSISTENT, Graph, Node, Phase
from mucudnn.ir.operations import make_node
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.ir.traits import Batch, Interval, NodeTraits, Operands, Rows, Strip
from mucudnn.passes.graph.split_axis import (
    SAMPLES,
    Parts,
    SplitAxis,
    asked_of,
    cuttable,
    interleave_slices,
    pieces_of,
    split_rule,
)


@dataclass(frozen=True, slots=True)
class Cut:
    """A node, or a piece of a decomposed one, and its number of parts."""

    node: Node
    parts: int
    how: Batch


_WHOLE = Batch((), ())


def split_along(graph: Graph, parts: Parts, along: SplitAxis) -> Graph:
    """Split the nodes of a step along an axis.

    A node has at most as many parts as its smallest tensor has rows.

    Args:
        graph: A training graph without updates, before in-place rewriting.
        parts: Number of parts of each node (1 for nodes missing in a mapping). Nodes
            that cannot be split stay whole.
        along: The axis.

    Raises:
        ValueError: A number of parts is below 1.
        TypeError: A number of parts is not an integer.
    """
    return _Splitter(graph, asked_of(parts), along).run()


class _Splitter:
    def __init__(
        self, graph: Graph, parts: Callable[[Node], int], along: SplitAxis
    ) -> None:
        self._graph, self._parts, self._along = graph, parts, along
        self._cuttable = cuttable(graph, along)
        self._slices = SplitTensors(graph, along.unit)
        self._totals: dict[str, str] = {}
        """Name of the running sum of each result that is accumulated."""
        self._phase: list[Cut] = []
        self._sums: set[str] = set()
        """Results of the open phase that are complete only at its end."""
        self._deferred: list[Node] = []
        """Unsplit nodes that run right after the open phase."""

    def run(self) -> Graph:
        graph, slices = self._graph, self._slices
        for node in graph.nodes:
            parts = self._parts(node) if node.name in self._cuttable else 1
            pieces: tuple[Node, ...] = (node,)
            # A node that cannot be cut as a whole may consist of pieces that can.
            if parts > 1 and split_rule(graph.tensors, node, self._along) is None:
                between, pieces = pieces_of(graph.tensors, node)
                slices.tensors.update((spec.name, spec) for spec in between)
            for piece in pieces:
                self._visit(self._cut(piece, parts))
        self._close()
        # What the graph returns is joined at the end.
        for name in (*graph.outputs, *graph.gradients.values()):
            slices.whole(name, graph.nodes[-1].phase)
        used = {t for node in slices.nodes for t in node.tensors} | set(graph.inputs)
        used_tensors = {
            name: spec
            for name, spec in slices.tensors.items()
            if name in used or spec.role in PERSISTENT
        }
        return replace(graph, tensors=used_tensors, nodes=tuple(slices.nodes))

    def _cut(self, node: Node, parts: int) -> Cut:
        """Return a node with at most as many parts as its tensors have rows."""
        tensors = self._slices.tensors
        how = split_rule(tensors, node, self._along) if parts > 1 else None
        if how is None:
            return Cut(node, 1, _WHOLE)
        most = self._along.size
        if self._along.axis != SAMPLES:
            axes = zip(node.tensors, (*how.inputs, *how.outputs), strict=True)
            rows = (tensors[t].shape[axis] for t, axis in axes if axis is not None)
            most = min(rows)
        return Cut(node, min(parts, most), how) if most > 1 else Cut(node, 1, _WHOLE)

    def _visit(self, cut: Cut) -> None:
        if cut.parts == 1:
            # A node that only uses sums may wait until all slices have run.
            if self._depends(cut.node):
                if self._can_defer(cut.node):
                    self._deferred.append(cut.node)
                    self._sums.update(cut.node.outputs)
                    return
                self._close()
            self._emit_whole(cut.node)
            return
        differs = bool(self._phase) and self._phase[-1].parts != cut.parts
        # Other numbers of parts, or sums that it reads, need all slices of before.
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
        self._emit_phase(phase)
        for node in deferred:
            self._emit_whole(node)
        # Halo rows that were copied in one phase are not reused in the next.
        self._slices.copies.clear()
        self._slices.begun = len(self._slices.nodes)

    # Emit nodes: slices of a phase interleaved, other nodes whole. Sums over the batch
    # are accumulated slice by slice, in place; the last sum has the tensor's own name.

    def _emit_phase(self, phase: Sequence[Cut]) -> None:
        """Emit nodes with the same number of parts, slice by slice."""
        strips = [
            [self._strip(cut, index) for index in range(cut.parts)] for cut in phase
        ]
        reads = [
            [_ends(cut.node.inputs, strip.inputs) for strip in of_node]
            for cut, of_node in zip(phase, strips, strict=True)
        ]
        # The last row (exclusive) of each slice of each result.
        ends: list[dict[str, list[int]]] = [{} for _ in phase]
        for cut, found in zip(phase, ends, strict=True):
            slices = [self._slices.rows(cut.parts, i) for i in range(cut.parts)]
            for name, axis in zip(cut.node.outputs, cut.how.outputs, strict=True):
                if axis is not None:
                    size = self._slices.tensors[name].shape[axis]
                    found[name] = [rows.of(size).stop for rows in slices]
        for position, index in interleave_slices(reads, ends):
            self._slice(phase[position], index, strips[position][index])

    def _emit_whole(self, node: Node) -> None:
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
        # An output is rows of a tensor, a part that is read beside all other parts, a
        # sum in which nodes accumulate, or a part that is added below.
        for position, axis in enumerate(how.outputs):
            name = node.outputs[position]
            if axis is not None:
                wanted = rows.of(slices.tensors[name].shape[axis]).interval
                outputs.append(slices.write(name, axis, wanted, index, strip.made))
                slices.realias(outputs[-1], node, inputs)
            elif position in how.gathered:
                outputs.append(slices.gather(name, index))
            elif how.accumulates:
                before = self._totals.get(name)
                if before is not None:
                    inputs.append(before)  # the node adds to the sum so far
                outputs.append(self._total(name, cut, index, before))
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
                traits=replace(
                    added.traits, batch=None, strips=None, joins_branches=False
                ),
            )
        )

    def _total(self, name: str, cut: Cut, index: int, before: str | None) -> str:
        """Declare the sum up to a slice; the last sum is the tensor itself."""
        total = name if index == cut.parts - 1 else f"{name}@0+{index}"
        self._totals[name] = total
        return self._slices.declare(name, total, alias=before)


def _ends(
    names: tuple[str, ...], rows: tuple[Interval | None, ...]
) -> Mapping[str, int]:
    """Return the last row (exclusive) that a slice reads of each tensor."""
    found: dict[str, int] = {}
    for name, part in zip(names, rows, strict=True):
        if part is not None:
            found[name] = max(part[1], found.get(name, 0))
    return found


# Track which row ranges of tensors exist, and under which names, in a split step.
#
# Rows computed by one slice are a storage of their own. Contiguous rows of a whole
# tensor are views with an offset. Parts that are needed together are joined once and
# replaced by the joined tensor, so that no bytes exist twice. Halo rows are copied for
# each phase and then freed. Halo rows of a neighbouring slice are copied as soon as the
# slice exists, so that it can be freed before they are read.


_VIEW = NodeTraits(view=True)


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor that holds rows `start` to `stop` of a tensor of the whole step."""

    name: str
    start: int
    stop: int


class SplitTensors:
    """Tensors and nodes of a step that is being split.

    Args:
        graph: The whole step.
        unit: Number of samples, or of equal parts that all images can be split into.

    Attributes:
        tensors: Tensors declared so far.
        nodes: Nodes emitted so far.
        copies: Copies of rows that the open phase may reuse.
        begun: Position of the first node of the open phase.
    """

    def __init__(self, graph: Graph, unit: int) -> None:
        self.tensors: dict[str, TensorSpec] = dict(graph.tensors)
        self.nodes: list[Node] = []
        self._graph, self._unit = graph, unit
        self._held: dict[str, list[_Held]] = {}
        self._axes: dict[str, int] = {}
        """Split axis of each tensor in `_held`."""
        self._gathered: dict[str, list[str]] = {}
        self._views: dict[tuple[str, int, int], str] = {}
        self.copies: dict[tuple[str, int, int], str] = {}
        self._copied = 0
        self.begun = 0
        self._to_crop: list[tuple[str, Interval, str, int]] = []

    def storages(self, name: str) -> str:
        """Return the storage of a tensor of the whole graph or of a decomposition."""
        return self._graph.storages.get(name, name)

    def rows(self, parts: int, index: int) -> Rows:
        """Return the rows of a slice; those of a batch differ by one sample at most."""
        unit = self._unit
        if parts > unit:
            return Rows(index, index + 1, parts)
        return Rows(index * unit // parts, (index + 1) * unit // parts, unit)

    def write(
        self, name: str, axis: int, rows: Interval, index: int, made: Interval | None
    ) -> str:
        """Declare the rows that a slice of a node computes; return the tensor to write.

        Args:
            name: Tensor of the whole step.
            axis: Split axis.
            rows: Rows of the slice.
            index: Index of the slice.
            made: Rows the node computes, if more than `rows`; see `crop`.
        """
        own_name, spec = f"{name}@{index}", self.tensors[name]
        self.tensors[own_name] = _with_rows(spec, own_name, axis, rows)
        self._held.setdefault(name, []).append(_Held(own_name, *rows))
        self._axes[name] = axis
        if made is None or made == rows:
            return own_name
        wide = f"{own_name}+"
        self.tensors[wide] = replace(_with_rows(spec, wide, axis, made), alias=None)
        part = rows[0] - made[0], rows[1] - made[0]
        self._to_crop.append((wide, part, own_name, axis))
        return wide

    def crop(self, phase: Phase) -> None:
        """Copy the wanted rows out of a larger result of the last node."""
        for wide, part, own_name, axis in self._to_crop:
            self._join(((wide, part),), own_name, axis, 0, phase)
        self._to_crop.clear()

    def gather(self, name: str, index: int) -> str:
        """Declare a slice's own result, to be read together with the other slices'."""
        own_name = self.partial(name, index)
        self._gathered.setdefault(name, []).append(own_name)
        return own_name

    def partial(self, name: str, index: int) -> str:
        """Declare a slice's contribution to a sum."""
        return self.declare(name, f"{name}@{index}", alias=None)

    def declare(self, name: str, own_name: str, alias: str | None) -> str:
        """Declare a tensor like one of the whole graph; return its name."""
        self.tensors[own_name] = replace(self.tensors[name], name=own_name, alias=alias)
        return own_name

    def realias(self, name: str, node: Node, inputs: Sequence[str]) -> None:
        """Let an aliasing result share the bytes of its node's present inputs."""
        spec = self.tensors[name]
        if spec.alias is not None:
            alias = aliased(self._graph, spec.alias, node, inputs)
            self.tensors[name] = replace(spec, alias=alias)

    def gathered(self, name: str, phase: Phase) -> tuple[str, ...]:
        """Return what an unsplit node reads: the tensor, or all slices' results."""
        if name in self._gathered:
            return tuple(self._gathered[name])
        return (self.whole(name, phase),)

    def whole(self, name: str, phase: Phase) -> str:
        """Return a tensor as a whole, joining its rows if necessary."""
        if name not in self._held:
            return name
        held, axis = self._held.pop(name), self._axes.pop(name)
        self.tensors[name] = replace(self.tensors[name], alias=None)
        sources = tuple((p.name, (0, p.stop - p.start)) for p in held)
        self._join(sources, name, axis, 0, phase)
        return name

    def read(self, name: str, axis: int, rows: Interval, phase: Phase) -> str:
        """Return rows of a tensor: an existing tensor, a view, or a joined copy.

        Rows outside of the tensor are zeros.
        """
        start, stop = rows
        size = self.tensors[name].shape[axis]
        held = self._held.get(name, [_Held(name, 0, size)])
        these = [p for p in held if p.start < stop and start < p.stop]
        inside = start >= 0 and stop <= size
        # Rows within one part are a view, if they are contiguous, or the part itself.
        if inside and len(these) == 1:
            contiguous = math.prod(self.tensors[name].shape[:axis]) == 1
            if contiguous or (these[0].start, these[0].stop) == rows:
                return self._part_or_view(name, axis, these[0], rows, phase)
        for known in (self._views, self.copies):
            if (name, start, stop) in known:
                return known[name, start, stop]
        # Joined rows that replace their parts spare later readers a copy.
        exact = bool(these) and (these[0].start, these[-1].stop) == rows
        replaced = inside and name in self._held and exact
        sources = tuple(
            (p.name, (max(start, p.start) - p.start, min(stop, p.stop) - p.start))
            for p in these
        )
        # Parts lie apart along an inner axis: join copies of the rows that are needed.
        if name in self._held and axis and len(these) > 1:
            sources = tuple(self._copy_halo(name, axis, *s, phase) for s in sources)
        joined = f"{name}@{start}:{stop}"
        if not replaced:
            self._copied += 1
            joined = f"{joined}#{self._copied}"
        self.tensors[joined] = self._like(name, joined, axis, rows)
        self._join(sources, joined, axis, max(0, -start), phase)
        (self._views if replaced else self.copies)[name, start, stop] = joined
        if replaced:
            rest = [p for p in held if p not in these]
            rest.append(_Held(joined, start, stop))
            self._held[name] = sorted(rest, key=lambda p: p.start)
        return joined

    def _copy_halo(
        self, name: str, axis: int, held: str, rows: Interval, phase: Phase
    ) -> tuple[str, Interval]:
        """Copy halo rows of another slice; return the slice if all rows are needed."""
        count = rows[1] - rows[0]
        if count == self.tensors[held].shape[axis]:
            return held, rows
        if (held, *rows) not in self.copies:
            self._copied += 1
            halo = f"{held}[{rows[0]}:{rows[1]}]#{self._copied}"
            self.tensors[halo] = self._like(name, halo, axis, rows)
            at = len(self.nodes)
            self._join(((held, rows),), halo, axis, 0, phase)
            # Run the copy right behind the last node that touched the slice, to free it
            # early.
            while at > self.begun and held not in self.nodes[at - 1].tensors:
                at -= 1
            if at > self.begun:
                self.nodes.insert(at, self.nodes.pop())
            self.copies[held, *rows] = halo
        return self.copies[held, *rows], (0, count)

    def _part_or_view(
        self, name: str, axis: int, held: _Held, rows: Interval, phase: Phase
    ) -> str:
        """Return rows of an existing tensor: the tensor itself, or a view."""
        start, stop = rows
        if (held.start, held.stop) == rows:
            return held.name
        key = held.name, start, stop
        if key in self._views:
            return self._views[key]
        view = f"{held.name}[{start}:{stop}]"
        spec = self._like(name, view, axis, rows)
        row = self.tensors[held.name].nbytes // (held.stop - held.start)
        offset = (start - held.start) * row
        self.tensors[view] = replace(spec, alias=held.name, offset=offset)
        self.nodes.append(
            Node(view, "slice", (held.name,), (view,), phase=phase, traits=_VIEW)
        )
        self._views[key] = view
        return view

    def _like(self, name: str, own_name: str, axis: int, rows: Interval) -> TensorSpec:
        spec = self.tensors[name]
        role = Role.ACTIVATION if spec.role is Role.INPUT else spec.role
        return replace(_with_rows(spec, own_name, axis, rows), alias=None, role=role)

    def _join(
        self,
        sources: tuple[tuple[str, Interval], ...],
        joined: str,
        axis: int,
        before: int,
        phase: Phase,
    ) -> None:
        """Emit a concatenation of row ranges, with zeros before and after."""
        names = tuple(name for name, _ in sources)
        parts = tuple(p for _, p in sources)
        attrs = {"axis": axis, "parts": parts, "before": before}
        node = make_node(
            self.tensors, f"{joined}:join", "concat", names, (joined,), attrs, phase
        )
        traits = replace(node.traits, batch=None, strips=None, joins_branches=False)
        self.nodes.append(replace(node, traits=traits))


def _with_rows(spec: TensorSpec, name: str, axis: int, rows: Interval) -> TensorSpec:
    """Return a spec with another number of rows and the size of its shape."""
    shape = (*spec.shape[:axis], rows[1] - rows[0], *spec.shape[axis + 1 :])
    return replace(spec, name=name, shape=shape, storage_bytes=None)


def aliased(graph: Graph, alias: str, node: Node, inputs: Sequence[str]) -> str | None:
    """Return the tensor whose bytes a result shares if its node reads these inputs.

    A view of a copy shares the copy's bytes, not those of the original `alias`. None if
    no input has the storage of the original.
    """
    now = dict(zip(node.inputs, inputs, strict=False))
    if alias in now:
        return now[alias]
    storages = graph.storages
    same = (now[t] for t in node.inputs if storages[t] == storages[alias])
    return next(same, None)


def of_whole(name: str) -> str:
    """Return the name of the whole step's tensor that a slice belongs to."""
    return name.partition("@")[0]
