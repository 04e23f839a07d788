"""Tape for writing the backward pass: nodes and gradients emitted so far.

The gradients of a fork are summed, in place if one of them has no other use. No
gradient is computed for tensors that do not depend on parameters.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mucudnn.ir.graph import Graph, Node, Phase, Role, TensorSpec
from mucudnn.ir.operations import make_node

__all__ = ["LOSS_SCALE", "Tape", "fed_by_parameters"]

LOSS_SCALE = "loss_scale"
"""Name of the scalar input that holds the loss's own gradient."""


class Tape:
    """A graph under construction, and the gradients known so far.

    Attributes:
        tensors: Tensors of the graph.
        nodes: Nodes of the graph.
        gradients: Gradient of each tensor.
    """

    def __init__(self, forward: Graph) -> None:
        self.tensors: dict[str, TensorSpec] = dict(forward.tensors)
        self.nodes: list[Node] = list(forward.nodes)
        self.gradients: dict[str, str] = {}
        self._wanted = fed_by_parameters(forward)
        self._shared: set[str] = set()
        self._taken = {*self.tensors, *(node.name for node in self.nodes)}
        self._counts: dict[str, int] = {}

    def seed(self, loss: str, scale: float | None) -> None:
        """Start from the gradient of the loss: `scale`, or an input if it is None."""
        if scale is None:
            spec = self.tensors[loss]
            spec = replace(spec, name=LOSS_SCALE, role=Role.INPUT, alias=None)
            self.tensors[LOSS_SCALE] = spec
            self.gradients[loss] = LOSS_SCALE
            self._shared.add(LOSS_SCALE)
            return
        self.emit("fill", (), loss, value=scale)

    def wants(self, tensor: str) -> bool:
        """Return whether the gradient of a tensor is needed."""
        return tensor in self._wanted

    def of(self, node: Node) -> str:
        """Return the gradient of a node's first result."""
        return self.gradients[node.outputs[0]]

    def emit(
        self, op: str, inputs: tuple[str, ...], of: str | tuple[str, ...], **attrs: Any
    ) -> None:
        """Append a node that contributes to gradients, if any of them is needed."""
        targets = (of,) if isinstance(of, str) else of
        if not any(self.wants(target) for target in targets):
            return
        outputs = tuple(self._declare(target) for target in targets)
        self._append(op, inputs, outputs, MappingProxyType(attrs))
        for target, contribution in zip(targets, outputs, strict=True):
            self._contribute(target, contribution)

    def emit_shared(
        self, op: str, inputs: tuple[str, ...], of: tuple[str, ...]
    ) -> None:
        """Append a node whose single result is the gradient of several tensors."""
        wanted = [target for target in of if self.wants(target)]
        if wanted:
            gradient = self._declare(wanted[0])
            self._append(op, inputs, (gradient,))
            for target in wanted:
                self.pass_on(target, gradient)

    def emit_within(
        self, op: str, inputs: tuple[str, ...], like: str, of: tuple[str, ...]
    ) -> str:
        """Append a node whose first result is a gradient inside a fused node.

        Returns:
            The name of the first result.
        """
        outputs = tuple(self._declare(target) for target in (like, *of))
        self._append(op, inputs, outputs)
        for target, contribution in zip(of, outputs[1:], strict=True):
            self._contribute(target, contribution)
        return outputs[0]

    def pass_on(self, of: str, gradient: str) -> None:
        """Let an existing gradient contribute to a tensor's gradient."""
        if self.wants(of):
            self._shared.add(gradient)
            self._contribute(of, gradient)

    def reshape(self, of: str, gradient: str) -> None:
        """Contribute a view of a gradient in the tensor's shape."""
        if not self.wants(of):
            return
        view = self._declare(of, alias=gradient)
        self._append("reshape", (gradient,), (view,))
        self._shared |= {gradient, view}
        self._contribute(of, view)

    def _contribute(self, of: str, contribution: str) -> None:
        known = self.gradients.get(of)
        if known is None:
            self.gradients[of] = contribution
            return
        both = (known, contribution)
        mine = next((g for g in both if g not in self._shared), None)
        total = self._declare(of, alias=mine)
        ordered = both if mine != contribution else (contribution, known)
        self._append("add", ordered, (total,))
        self.gradients[of] = total

    def _append(
        self,
        op: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        attrs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        name, phase = self._unique(f"{op}.grad"), Phase.BACKWARD
        node = make_node(self.tensors, name, op, inputs, outputs, attrs, phase)
        self.nodes.append(node)

    def _declare(self, of: str, alias: str | None = None) -> str:
        spec = self.tensors[of]
        name = self._unique(f"d:{of}")
        self.tensors[name] = TensorSpec(
            name, spec.shape, spec.dtype, Role.GRADIENT, alias, layout=spec.layout
        )
        return name

    def _unique(self, name: str) -> str:
        unique = name
        while unique in self._taken:
            self._counts[name] = self._counts.get(name, 0) + 1
            unique = f"{name}.{self._counts[name]}"
        self._taken.add(unique)
        return unique


def fed_by_parameters(graph: Graph) -> set[str]:
    """Return the tensors that depend on parameters, parameters included."""
    fed = {spec.name for spec in graph.with_role(Role.PARAMETER)}
    for node in graph.nodes:
        if any(name in fed for name in node.inputs):
            fed.update(node.outputs)
    return fed
