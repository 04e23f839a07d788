"""Rewrite a graph so that dropped activations are computed again when needed.

This runs before liveness and before anything is made in-place: recomputing a tensor
lengthens the lives of its inputs. A copied batch norm leaves the running statistics
alone; a copied dropout draws the same mask, because its mask follows from the step.
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
    for node in graph.nodes:
        rewriter.visit(node)
    return Graph(
        MappingProxyType(rewriter.tensors),
        tuple(rewriter.nodes),
        graph.outputs,
        graph.gradients,
        graph.initializers,
    )


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
        self._changed: set[str] = set()
        self._copies: dict[str, str] = {}
        self._count = 0

    def visit(self, node: Node) -> None:
        """Append a node; before it, what it needs again."""
        if node.phase is Phase.BACKWARD:
            mine: dict[str, str] = {}
            inputs = tuple(self._again(name, mine) for name in node.inputs)
            if inputs != node.inputs:
                node = replace(node, inputs=inputs)
                self._follow_aliases(node)
        if node.phase is not Phase.FORWARD:
            self._changed.update(self._graph.storages[t] for t in node.mutates)
        self.nodes.append(node)

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
            node = self._graph.producers[top]
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
        it is made again for what is `asking`. What follows from a weight that has been
        updated meanwhile cannot be.
        """
        node = self._graph.producers.get(name)
        storages = self._graph.storages
        if name in self._copies:
            return self._copies
        if node is None or any(storages[t] in self._changed for t in node.inputs):
            return None
        match self._residency.get(storages[name]):
            case Residency.RECOMPUTE:
                return self._copies
            case Residency.RECOMPUTE_EACH:
                return mine
        gone = node.phase is Phase.FORWARD and storages[name] not in self._saved
        return asking if gone else None

    def _copy(self, node: Node, inputs: tuple[str, ...], known: dict[str, str]) -> None:
        self._count += 1
        for output in node.outputs:
            spec = self._graph.tensors[output]
            name = f"{output}~{self._count}"
            alias = None
            if spec.alias is not None:  # a view: of the copy of what it views
                alias = inputs[node.inputs.index(spec.alias)]
            self.tensors[name] = TensorSpec(
                name, spec.shape, spec.dtype, Role.ACTIVATION, alias
            )
            known[output] = name
        attrs = node.attrs
        if "update" in attrs:
            attrs = MappingProxyType({**attrs, "update": False})
        self.nodes.append(
            Node(
                f"{node.name}~{self._count}",
                node.op,
                inputs,
                tuple(known[output] for output in node.outputs),
                attrs,
                Phase.BACKWARD,
            )
        )

    def _follow_aliases(self, node: Node) -> None:
        """A view of a copy shares the copy's bytes, not the original's."""
        changed = dict(zip(self._before(node), node.inputs, strict=True))
        for output in node.outputs:
            spec = self.tensors[output]
            if spec.alias is not None and spec.alias in changed:
                self.tensors[output] = replace(spec, alias=changed[spec.alias])

    def _before(self, node: Node) -> tuple[str, ...]:
        return self._graph.by_name[node.name].inputs
