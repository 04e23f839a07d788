"""Track which row ranges of tensors exist, and under which names, in a split step.

Rows computed by one slice are a storage of their own. Contiguous rows of a whole tensor
are views with an offset. Parts that are needed together are joined once and replaced by
the joined tensor, so that no bytes exist twice. Halo rows are copied for each phase and
then freed. Halo rows of a neighbouring slice are copied as soon as the slice exists, so
that it can be freed before they are read.
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
    """A tensor that holds rows `start` to `stop` of a tensor of the whole step."""

    name: str
    start: int
    stop: int


class Slices:
    """Tensors and nodes of a step that is being split.

    Args:
        graph: The whole step.
        unit: Number of samples, or of equal parts that all images can be split into.

    Attributes:
        tensors: Tensors declared so far.
        nodes: Nodes emitted so far.
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
        self._copies: dict[tuple[str, int, int], str] = {}
        self._copied = 0
        self._begun = 0
        """Position of the first node of the open phase."""
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

    def forget_copies(self) -> None:
        """Start a phase: halo rows copied before are not reused."""
        self._copies.clear()
        self._begun = len(self.nodes)

    def gather(self, name: str, index: int) -> str:
        """Declare a slice's own result, to be read together with the other slices'."""
        own_name = self.partial(name, index)
        self._gathered.setdefault(name, []).append(own_name)
        return own_name

    def partial(self, name: str, index: int) -> str:
        """Declare a slice's contribution to a sum."""
        own_name = f"{name}@{index}"
        self.declare(name, own_name, alias=None)
        return own_name

    def declare(self, name: str, own_name: str, alias: str | None) -> None:
        """Declare a tensor like one of the whole graph."""
        spec = self.tensors[name]
        self.tensors[own_name] = replace(spec, name=own_name, alias=alias)

    def realias(self, name: str, node: Node, inputs: Sequence[str]) -> None:
        """Let an aliasing result share the bytes of its node's present inputs."""
        spec = self.tensors[name]
        if spec.alias is not None:
            alias = self._alias(spec, node, inputs)
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
        if inside and len(these) == 1 and self._viewable(name, axis, these[0], rows):
            return self._part_or_view(name, axis, these[0], rows, phase)
        for known in (self._views, self._copies):
            if (name, start, stop) in known:
                return known[name, start, stop]
        exact = bool(these) and (these[0].start, these[-1].stop) == rows
        replaced = inside and name in self._held and exact
        sources = tuple(
            (p.name, (max(start, p.start) - p.start, min(stop, p.stop) - p.start))
            for p in these
        )
        if name in self._held and axis and len(these) > 1:
            sources = tuple(self._copy_halo(name, axis, *s, phase) for s in sources)
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

    def _copy_halo(
        self, name: str, axis: int, held: str, rows: Interval, phase: Phase
    ) -> tuple[str, Interval]:
        """Copy halo rows of a neighbouring slice; return the slice if all are needed.

        The copy runs right behind the last node that touched the slice, to free it
        early.
        """
        count = rows[1] - rows[0]
        if count == self.tensors[held].shape[axis]:
            return held, rows
        if (held, *rows) not in self._copies:
            self._copied += 1
            halo = f"{held}[{rows[0]}:{rows[1]}]#{self._copied}"
            self.tensors[halo] = self._like(name, halo, axis, rows)
            at = len(self.nodes)
            self._join(((held, rows),), halo, axis, 0, phase)
            while at > self._begun and held not in self.nodes[at - 1].tensors:
                at -= 1
            if at > self._begun:
                self.nodes.insert(at, self.nodes.pop())
            self._copies[held, *rows] = halo
        return self._copies[held, *rows], (0, count)

    def _viewable(self, name: str, axis: int, held: _Held, rows: Interval) -> bool:
        """Return whether rows are a whole tensor or contiguous in it."""
        if (held.start, held.stop) == rows:
            return True
        return math.prod(self.tensors[name].shape[:axis]) == 1

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
        attrs = MappingProxyType(
            {"axis": axis, "parts": tuple(p for _, p in sources), "before": before}
        )
        node = make_node(
            self.tensors, f"{joined}:join", "concat", names, (joined,), attrs, phase
        )
        traits = replace(node.traits, batch=None, strips=None, joint=False)
        self.nodes.append(replace(node, traits=traits))

    def _alias(self, spec: TensorSpec, node: Node, inputs: Sequence[str]) -> str | None:
        """Return the tensor whose bytes a slice of a result shares."""
        if spec.alias is None:
            return None
        now = dict(zip(node.inputs, inputs, strict=False))
        if spec.alias in now:
            return now[spec.alias]
        storages = self._graph.storages
        same = (now[t] for t in node.inputs if storages[t] == storages[spec.alias])
        return next(same, None)


def _with_rows(spec: TensorSpec, name: str, axis: int, rows: Interval) -> TensorSpec:
    """Return a spec with another number of rows and the size of its shape."""
    shape = (*spec.shape[:axis], rows[1] - rows[0], *spec.shape[axis + 1 :])
    return replace(spec, name=name, shape=shape, storage_bytes=None)


def of_whole(name: str) -> str:
    """Return the name of the whole step's tensor that a slice belongs to."""
    return name.partition("@")[0]
