"""Rewrite a graph so that dropped activations are computed again when needed.

This runs before liveness and before anything is made in-place: recomputing a tensor
lengthens the lives of its inputs. A copied batch norm leaves the running statistics
alone; a copied dropout draws the same mask, because its mask follows from the step.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node, Phase, Role, TensorSpec
from mucudnn.passes.residency import Residency

__all__ = ["rematerialize"]

_AGAIN = (Residency.RECOMPUTE, Residency.RECOMPUTE_EACH)


def rematerialize(graph: Graph, residency: Mapping[str, Residency]) -> Graph:
    """Copy the producers of recomputed tensors to just before their backward uses.

    With `RECOMPUTE` the copy serves all later uses; with `RECOMPUTE_EACH` every
    backward node that needs it has a copy of its own, and of what that needs.

    Args:
        graph: A training graph that nothing has made in-place yet.
        residency: Of saved tensors.
    """
    if not any(choice in _AGAIN for choice in residency.values()):
        return graph
    rewriter = _Rewriter(graph, residency)
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
    def __init__(self, graph: Graph, residency: Mapping[str, Residency]) -> None:
        self.tensors: dict[str, TensorSpec] = dict(graph.tensors)
        self.nodes: list[Node] = []
        self._graph = graph
        self._residency = residency
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
        self.nodes.append(node)

    def _again(self, name: str, mine: dict[str, str]) -> str:
        """The tensor itself, or a copy of it made now; `mine` are this node's own."""
        storage = self._graph.storages[name]
        choice = self._residency.get(storage)
        if choice not in _AGAIN or name not in self._graph.producers:
            return name
        each = choice is Residency.RECOMPUTE_EACH
        known = mine if each else self._copies
        if name not in known:
            self._copy(self._graph.producers[name], known, mine)
        return known[name]

    def _copy(self, node: Node, known: dict[str, str], mine: dict[str, str]) -> None:
        inputs = tuple(self._again(name, mine) for name in node.inputs)
        self._count += 1
        for output in node.outputs:
            spec = self._graph.tensors[output]
            name = f"{output}~{self._count}"
            alias = None
            if spec.alias is not None:  # a view: of the copy of what it views
                alias = inputs[node.inputs.index(spec.alias)]
            self.tensors[name] = replace(
                spec, name=name, alias=alias, role=Role.ACTIVATION
            )
            known[output] = name
        attrs = node.attrs
        if "update" in attrs:
            attrs = MappingProxyType({**attrs, "update": False})
        self.nodes.append(
            replace(
                node,
                name=f"{node.name}~{self._count}",
                inputs=inputs,
                outputs=tuple(known[output] for output in node.outputs),
                attrs=attrs,
                phase=Phase.BACKWARD,
                mutates=(),
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
