"""Rewrite a graph so that dropped activations are computed again when needed.

This runs before liveness and before anything is made in-place: recomputing a tensor
lengthens the lives of its inputs. A copy mutates nothing (a batch norm's leaves the
running statistics alone, by its `replay`), and one that draws random numbers draws the
same. What cannot run again, or reads what has been overwritten since, is kept.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node, Phase, Role, TensorSpec
from mucudnn.ir.residency import RECOMPUTED, Residency
from mucudnn.passes.graph.saved_tensors import saved_tensors

__all__ = ["rematerialize"]


def rematerialize(
    graph: Graph,
    residency: Mapping[str, Residency],
    saved: Collection[str] | None = None,
) -> Graph:
    """Copy the producers of recomputed tensors to just before their backward uses.

    With `RECOMPUTE` the copy serves all later uses; with `RECOMPUTE_EACH` every
    backward node that needs it has a copy of its own, and of what that needs.

    Args:
        graph: A training graph that nothing has made in-place yet.
        residency: Of saved tensors.
        saved: Names of the graph's saved tensors, if they are known.
    """
    if not any(choice in RECOMPUTED for choice in residency.values()):
        return graph
    if saved is None:
        saved = {tensor.name for tensor in saved_tensors(graph)}
    rewriter = _Rewriter(graph, residency, saved)
    for position, node in enumerate(graph.nodes):
        rewriter.visit(node, position)
    return Graph(
        MappingProxyType(rewriter.tensors),
        tuple(rewriter.nodes),
        graph.outputs,
        graph.gradients,
        graph.initializers,
    )


def _dropped(
    graph: Graph, residency: Mapping[str, Residency], saved: Collection[str]
) -> frozenset[str]:
    """Tensors that may not be there, or be there anew, when they are read again.

    Of a node that runs again all results are new.
    """
    recomputed = {name for name, choice in residency.items() if choice in RECOMPUTED}
    storages = graph.storages
    found: set[str] = set()
    for node in graph.nodes:
        forward = node.phase is Phase.FORWARD
        for storage in (storages[name] for name in node.outputs):
            if storage in recomputed or (forward and storage not in saved):
                found.update(node.outputs)
    return frozenset(found)


class _Rewriter:
    def __init__(
        self,
        graph: Graph,
        residency: Mapping[str, Residency],
        saved: Collection[str],
    ) -> None:
        self.tensors: dict[str, TensorSpec] = dict(graph.tensors)
        self.nodes: list[Node] = []
        self._graph = graph
        self._residency = residency
        self._saved = saved
        self._changed: dict[str, int] = {}
        self._copies: dict[str, str] = {}
        self._count = 0
        self._dropped = _dropped(graph, residency, saved)

    def visit(self, node: Node, now: int) -> None:
        """Append a node; before it, what it needs again."""
        again = node.phase is Phase.BACKWARD
        if again and not self._dropped.isdisjoint(node.inputs):
            mine: dict[str, str] = {}
            inputs = tuple(self._again(name, mine) for name in node.inputs)
            for spec in (self.tensors[output] for output in node.outputs):
                alias = self._alias(node, spec, inputs)
                if alias != spec.alias:
                    self.tensors[spec.name] = replace(spec, alias=alias)
            if inputs != node.inputs:
                node = replace(node, inputs=inputs)
        self.nodes.append(node)
        for storage in self._graph.overwritten.get(now, ()):
            self._changed[storage] = now

    def _again(self, name: str, mine: dict[str, str]) -> str:
        """The tensor itself, or a copy of it made now; `mine` are this node's own."""
        known = self._known(name, self._copies, mine)
        if known is None:
            return name
        pending = [(name, known)]
        while pending:
            top, known = pending[-1]
            if top in known:
                pending.pop()
                continue
            first = self._graph.producers[top]
            node = first.once_more or first
            inputs = [(t, self._known(t, known, mine)) for t in node.inputs]
            missing = [(t, k) for t, k in inputs if k is not None and t not in k]
            if missing:
                pending += reversed(missing)
            else:
                found = tuple(t if k is None else k[t] for t, k in inputs)
                self._copy(node, found, known)
        return known[name]

    def _known(
        self, name: str, asking: dict[str, str], mine: dict[str, str]
    ) -> dict[str, str] | None:
        """Where a copy of a tensor is noted; None if the original is still there.

        What no backward node of the graph reads is gone when the forward pass is over:
        it is made again for what is `asking`.
        """
        node = self._graph.producers.get(name)
        storages = self._graph.storages
        if name in self._copies:
            return self._copies
        if node is None or not (node.remakes(name) and self._runs_again(node)):
            return None
        match self._residency.get(storages[name]):
            case Residency.RECOMPUTE:
                return self._copies
            case Residency.RECOMPUTE_EACH:
                return mine
        gone = node.phase is Phase.FORWARD and storages[name] not in self._saved
        return asking if gone else None

    def _runs_again(self, node: Node) -> bool:
        """Whether a node may run now and finds what it has read the first time.

        What follows from a weight that has been updated meanwhile does not.
        """
        if not node.recomputable:
            return False
        read = (self._graph.storages[t] for t in node.inputs if t not in node.mutates)
        changed = [
            self._changed[storage] for storage in read if storage in self._changed
        ]
        return not changed or max(changed) < self._graph.positions[node.name]

    def _copy(self, node: Node, inputs: tuple[str, ...], known: dict[str, str]) -> None:
        self._count += 1
        outputs = tuple(f"{output}~{self._count}" for output in node.outputs)
        for output, name in zip(node.outputs, outputs, strict=True):
            spec = self._graph.tensors[output]
            self.tensors[name] = replace(
                spec,
                name=name,
                role=Role.ACTIVATION,
                alias=self._alias(node, spec, inputs),
            )
        attrs = node.attrs
        if node.traits.replay:
            attrs = MappingProxyType({**attrs, **dict(node.traits.replay)})
        known.update(zip(node.outputs, outputs, strict=True))
        self.nodes.append(
            Node(
                f"{node.name}~{self._count}",
                node.op,
                inputs,
                outputs,
                attrs,
                Phase.BACKWARD,
                traits=node.traits,
            )
        )

    def _alias(
        self, node: Node, spec: TensorSpec, inputs: tuple[str, ...]
    ) -> str | None:
        """What a result has the bytes of if its node reads these inputs.

        A view of a copy shares the copy's bytes, not the original's.
        """
        alias = spec.alias
        if alias is None:
            return None
        now = dict(zip(node.inputs, inputs, strict=True))
        if alias in now:
            return now[alias]
        storages = self._graph.storages
        same = (now[t] for t in node.inputs if storages[t] == storages[alias])
        return next(same, alias)
