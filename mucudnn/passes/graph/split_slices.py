"""Which rows of a tensor exist, and under which name: tensors while a step is cut.

Rows that were computed together are a storage of their own. Rows of a tensor that is
there as one are a view of it, some bytes behind its beginning. What is needed in larger
parts than there are is put together once; from then on smaller ones are views of that,
so that no bytes are held twice.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node, Phase, Role, TensorSpec
from mucudnn.ir.operations import make_node
from mucudnn.ir.traits import NodeTraits, Rows

__all__ = ["Slices", "of_whole"]

_VIEW = NodeTraits(view=True)


@dataclass(frozen=True, slots=True)
class _Held:
    """Rows that exist, `start` to `stop` of the tensor's own first axis."""

    name: str
    start: int
    stop: int


class Slices:
    """The tensors and nodes of a step that is being cut.

    Attributes:
        tensors: Declared so far.
        nodes: Emitted so far.
    """

    def __init__(self, graph: Graph, batch: int) -> None:
        self.tensors: dict[str, TensorSpec] = dict(graph.tensors)
        self.nodes: list[Node] = []
        self._graph, self._batch = graph, batch
        self._held: dict[str, list[_Held]] = {}
        self._gathered: dict[str, list[str]] = {}
        self._views: dict[tuple[str, int, int], str] = {}

    def storages(self, name: str) -> str:
        """The storage of a tensor of the whole graph, or of one between pieces."""
        return self._graph.storages.get(name, name)

    def rows(self, parts: int, index: int) -> Rows:
        """The samples of a slice; sizes differ by one at most."""
        start = index * self._batch // parts
        return Rows(start, (index + 1) * self._batch // parts, self._batch)

    def write(
        self, name: str, rows: Rows, index: int, node: Node, inputs: list[str]
    ) -> str:
        """Declare rows that a slice of a node computes from these inputs."""
        start, stop = self._of(name, rows)
        mine = f"{name}@{index}"
        spec = self.tensors[name]
        alias = self._alias(spec, node, inputs)
        shape = (stop - start, *spec.shape[1:])
        self.tensors[mine] = replace(spec, name=mine, shape=shape, alias=alias)
        self.tensors[mine] = _sized(self.tensors[mine])
        self._held.setdefault(name, []).append(_Held(mine, start, stop))
        return mine

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

    def realias(self, name: str, node: Node, inputs: tuple[str, ...]) -> None:
        """Let a result of a whole node share the bytes of what it reads now."""
        spec = self.tensors[name]
        if spec.alias is not None:
            alias = self._alias(spec, node, list(inputs))
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
        held = self._held.pop(name)
        self.tensors[name] = replace(self.tensors[name], alias=None)
        self._join(tuple(piece.name for piece in held), name, phase)
        return name

    def read(self, name: str, rows: Rows, phase: Phase) -> str:
        """Some rows of a tensor, as they are or as a view."""
        start, stop = self._of(name, rows)
        if name not in self._held:
            whole = _Held(name, 0, self.tensors[name].shape[0])
            return self._part(name, whole, start, stop, phase)
        if (name, start, stop) in self._views:
            return self._views[name, start, stop]
        held = self._held[name]
        these = [p for p in held if p.start < stop and start < p.stop]
        if len(these) == 1:
            return self._part(name, these[0], start, stop, phase)
        parts = tuple(
            self._part(name, p, max(start, p.start), min(stop, p.stop), phase)
            for p in these
        )
        joined = f"{name}@{start}:{stop}"
        self.tensors[joined] = self._like(name, joined, start, stop)
        self._join(parts, joined, phase)
        self._views[name, start, stop] = joined
        inside = [p for p in these if start <= p.start and p.stop <= stop]
        if inside == these:
            rest = [p for p in held if p not in these]
            rest.append(_Held(joined, start, stop))
            self._held[name] = sorted(rest, key=lambda p: p.start)
        return joined

    def _part(self, name: str, held: _Held, start: int, stop: int, phase: Phase) -> str:
        """Rows of what is there: itself, or a view of it."""
        if (held.start, held.stop) == (start, stop):
            return held.name
        key = held.name, start, stop
        if key in self._views:
            return self._views[key]
        view = f"{held.name}[{start}:{stop}]"
        spec = self._like(name, view, start, stop)
        row = self.tensors[held.name].nbytes // (held.stop - held.start)
        offset = (start - held.start) * row
        self.tensors[view] = replace(spec, alias=held.name, offset=offset)
        self.nodes.append(
            Node(view, "slice", (held.name,), (view,), phase=phase, traits=_VIEW)
        )
        self._views[key] = view
        return view

    def _like(self, name: str, mine: str, start: int, stop: int) -> TensorSpec:
        spec = self.tensors[name]
        role = Role.ACTIVATION if spec.role is Role.INPUT else spec.role
        shape = (stop - start, *spec.shape[1:])
        return _sized(replace(spec, name=mine, shape=shape, alias=None, role=role))

    def _join(self, sources: tuple[str, ...], joined: str, phase: Phase) -> None:
        attrs = MappingProxyType({"axis": 0})
        node = make_node(
            self.tensors, f"{joined}:join", "concat", sources, (joined,), attrs, phase
        )
        self.nodes.append(replace(node, traits=replace(node.traits, joint=False)))

    def _of(self, name: str, rows: Rows) -> tuple[int, int]:
        """Rows of a tensor's own first axis, which may be several for a sample."""
        each = self.tensors[name].shape[0] // self._batch
        return rows.start * each, rows.stop * each

    def _alias(self, spec: TensorSpec, node: Node, inputs: list[str]) -> str | None:
        """What a slice of a result has the bytes of."""
        if spec.alias is None:
            return None
        now = dict(zip(node.inputs, inputs, strict=False))
        if spec.alias in now:
            return now[spec.alias]
        storages = self._graph.storages
        same = (now[t] for t in node.inputs if storages[t] == storages[spec.alias])
        return next(same, None)


def _sized(spec: TensorSpec) -> TensorSpec:
    """A spec of other rows, whose size follows from its shape."""
    return spec if spec.storage_bytes is None else replace(spec, storage_bytes=None)


def of_whole(name: str) -> str:
    """The tensor of the whole step that a slice is of."""
    return name.partition("@")[0]
