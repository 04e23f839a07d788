"""Which rows of a tensor exist, and under which name: tensors while a step is cut.

Rows that were computed together are a storage of their own. Rows of a tensor that is
there as one are a view of it, some bytes behind its beginning, if they are bytes in a
row. What is needed in larger parts than there are is put together once; from then on
smaller ones are taken of that, so that no bytes are held twice. Rows that windows reach
over are copied for one node after the other, and then gone. Those of a neighbour are
copied on their own first, as soon as it is there: it need not stay until they are read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node, Phase, Role, TensorSpec
from mucudnn.ir.operations import make_node
from mucudnn.ir.traits import Interval, NodeTraits, Rows

__all__ = ["Slices", "of_whole"]

_VIEW = NodeTraits(view=True)


@dataclass(frozen=True, slots=True)
class _Held:
    """Rows that exist, `start` to `stop` of the tensor's own axis."""

    name: str
    start: int
    stop: int


class Slices:
    """The tensors and nodes of a step that is being cut.

    Args:
        graph: The whole step.
        unit: In how many equal parts everything can be cut; samples of a batch.

    Attributes:
        tensors: Declared so far.
        nodes: Emitted so far.
    """

    def __init__(self, graph: Graph, unit: int) -> None:
        self.tensors: dict[str, TensorSpec] = dict(graph.tensors)
        self.nodes: list[Node] = []
        self._graph, self._unit = graph, unit
        self._held: dict[str, list[_Held]] = {}
        self._axes: dict[str, int] = {}
        """Tensor of which rows exist -> their axis."""
        self._gathered: dict[str, list[str]] = {}
        self._views: dict[tuple[str, int, int], str] = {}
        self._copies: dict[tuple[str, int, int], str] = {}
        self._copied = 0
        self._begun = 0
        """The first node of the open phase."""
        self._to_crop: list[tuple[str, Interval, str, int]] = []

    def storages(self, name: str) -> str:
        """The storage of a tensor of the whole graph, or of one between pieces."""
        return self._graph.storages.get(name, name)

    def rows(self, parts: int, index: int) -> Rows:
        """The part of a slice; those of a batch differ by one sample at most."""
        unit = self._unit
        if parts > unit:
            return Rows(index, index + 1, parts)
        return Rows(index * unit // parts, (index + 1) * unit // parts, unit)

    def write(
        self, name: str, axis: int, rows: Interval, index: int, made: Interval | None
    ) -> str:
        """Declare rows that a slice of a node computes, and what it computes them in.

        Args:
            name: The tensor.
            axis: Its axis.
            rows: What is wanted.
            index: Of the slice.
            made: What the node computes, if more: `crop` then takes the rest away.
        """
        mine, spec = f"{name}@{index}", self.tensors[name]
        self.tensors[mine] = _with_rows(spec, mine, axis, rows)
        self._held.setdefault(name, []).append(_Held(mine, *rows))
        self._axes[name] = axis
        if made is None or made == rows:
            return mine
        wide = f"{mine}+"
        self.tensors[wide] = replace(_with_rows(spec, wide, axis, made), alias=None)
        part = rows[0] - made[0], rows[1] - made[0]
        self._to_crop.append((wide, part, mine, axis))
        return wide

    def crop(self, phase: Phase) -> None:
        """Copy the rows that were wanted out of those that the last node computed."""
        for wide, part, mine, axis in self._to_crop:
            self._join(((wide, part),), mine, axis, 0, phase)
        self._to_crop.clear()

    def forget_copies(self) -> None:
        """From here on rows that were copied for windows are copied anew."""
        self._copies.clear()
        self._begun = len(self.nodes)

    def gather(self, name: str, index: int) -> str:
        """Declare a slice's own result of those that are read together."""
        mine = self.partial(name, index)
        self._gathered.setdefault(name, []).append(mine)
        return mine

    def partial(self, name: str, index: int) -> str:
        """Declare what a slice adds to a sum."""
        mine = f"{name}@{index}"
        self.declare(name, mine, alias=None)
        return mine

    def declare(self, name: str, mine: str, alias: str | None) -> None:
        """Declare another tensor like one of the whole graph."""
        spec = self.tensors[name]
        self.tensors[mine] = replace(spec, name=mine, alias=alias)

    def realias(self, name: str, node: Node, inputs: Sequence[str]) -> None:
        """Let a node's result, or rows of it, share the bytes of what it reads now."""
        spec = self.tensors[name]
        if spec.alias is not None:
            alias = self._alias(spec, node, inputs)
            self.tensors[name] = replace(spec, alias=alias)

    def gathered(self, name: str, phase: Phase) -> tuple[str, ...]:
        """What a whole node reads for a tensor: it, or what slices left of it."""
        if name in self._gathered:
            return tuple(self._gathered[name])
        return (self.whole(name, phase),)

    def whole(self, name: str, phase: Phase) -> str:
        """A tensor as one, its rows put together if need be."""
        if name not in self._held:
            return name
        held, axis = self._held.pop(name), self._axes.pop(name)
        self.tensors[name] = replace(self.tensors[name], alias=None)
        sources = tuple((p.name, (0, p.stop - p.start)) for p in held)
        self._join(sources, name, axis, 0, phase)
        return name

    def read(self, name: str, axis: int, rows: Interval, phase: Phase) -> str:
        """Some rows of a tensor: as they are, as a view, or a copy.

        Those outside of the tensor are zeros.
        """
        start, stop = rows
        size = self.tensors[name].shape[axis]
        held = self._held.get(name, [_Held(name, 0, size)])
        these = [p for p in held if p.start < stop and start < p.stop]
        inside = start >= 0 and stop <= size
        if inside and len(these) == 1 and self._viewable(name, axis, these[0], rows):
            return self._part(name, axis, these[0], rows, phase)
        for known in (self._views, self._copies):
            if (name, start, stop) in known:
                return known[name, start, stop]
        replaced = inside and name in self._held and _cover(these, rows)
        sources = tuple(
            (p.name, (max(start, p.start) - p.start, min(stop, p.stop) - p.start))
            for p in these
        )
        if name in self._held and axis and len(these) > 1:
            sources = tuple(self._edge(name, axis, *s, phase) for s in sources)
        joined = f"{name}@{start}:{stop}"
        if not replaced:
            self._copied += 1
            joined = f"{joined}#{self._copied}"
        self.tensors[joined] = self._like(name, joined, axis, rows)
        self._join(sources, joined, axis, max(0, -start), phase)
        (self._views if replaced else self._copies)[name, start, stop] = joined
        if replaced:
            rest = [p for p in held if p not in these]
            rest.append(_Held(joined, start, stop))
            self._held[name] = sorted(rest, key=lambda p: p.start)
        return joined

    def _edge(
        self, name: str, axis: int, held: str, rows: Interval, phase: Phase
    ) -> tuple[str, Interval]:
        """Rows of a neighbour on their own; all there are as they are.

        They are copied behind the node that last touched it, so that it can go.
        """
        count = rows[1] - rows[0]
        if count == self.tensors[held].shape[axis]:
            return held, rows
        if (held, *rows) not in self._copies:
            self._copied += 1
            edge = f"{held}[{rows[0]}:{rows[1]}]#{self._copied}"
            self.tensors[edge] = self._like(name, edge, axis, rows)
            at = len(self.nodes)
            self._join(((held, rows),), edge, axis, 0, phase)
            while at > self._begun and held not in self.nodes[at - 1].tensors:
                at -= 1
            if at > self._begun:
                self.nodes.insert(at, self.nodes.pop())
            self._copies[held, *rows] = edge
        return self._copies[held, *rows], (0, count)

    def _viewable(self, name: str, axis: int, held: _Held, rows: Interval) -> bool:
        """Whether rows of what is there are that, or bytes in a row of it."""
        if (held.start, held.stop) == rows:
            return True
        return math.prod(self.tensors[name].shape[:axis]) == 1

    def _part(
        self, name: str, axis: int, held: _Held, rows: Interval, phase: Phase
    ) -> str:
        """Rows of what is there: itself, or a view of it."""
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

    def _like(self, name: str, mine: str, axis: int, rows: Interval) -> TensorSpec:
        spec = self.tensors[name]
        role = Role.ACTIVATION if spec.role is Role.INPUT else spec.role
        return replace(_with_rows(spec, mine, axis, rows), alias=None, role=role)

    def _join(
        self,
        sources: tuple[tuple[str, Interval], ...],
        joined: str,
        axis: int,
        before: int,
        phase: Phase,
    ) -> None:
        """Rows of several tensors behind each other, zeros before and behind them."""
        names = tuple(name for name, _ in sources)
        attrs = MappingProxyType(
            {"axis": axis, "parts": tuple(p for _, p in sources), "before": before}
        )
        node = make_node(
            self.tensors, f"{joined}:join", "concat", names, (joined,), attrs, phase
        )
        traits = replace(node.traits, batch=None, strips=None, joint=False)
        self.nodes.append(replace(node, traits=traits))

    def _alias(self, spec: TensorSpec, node: Node, inputs: Sequence[str]) -> str | None:
        """What a slice of a result has the bytes of."""
        if spec.alias is None:
            return None
        now = dict(zip(node.inputs, inputs, strict=False))
        if spec.alias in now:
            return now[spec.alias]
        storages = self._graph.storages
        same = (now[t] for t in node.inputs if storages[t] == storages[spec.alias])
        return next(same, None)


def _with_rows(spec: TensorSpec, name: str, axis: int, rows: Interval) -> TensorSpec:
    """A spec of other rows, whose size follows from its shape."""
    shape = (*spec.shape[:axis], rows[1] - rows[0], *spec.shape[axis + 1 :])
    return replace(spec, name=name, shape=shape, storage_bytes=None)


def _cover(held: list[_Held], rows: Interval) -> bool:
    """Whether rows are all of those that these have."""
    return bool(held) and (held[0].start, held[-1].stop) == rows


def of_whole(name: str) -> str:
    """The tensor of the whole step that a slice is of."""
    return name.partition("@")[0]
