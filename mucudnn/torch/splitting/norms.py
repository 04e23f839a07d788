"""Batch normalisations rewritten into parts: all but the statistics are cut."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.ir.graph import Node, TensorSpec
from mucudnn.ir.traits import PLAIN, NodeTraits
from mucudnn.torch.lowering.lowered import Call, Layout, Lowered, Operand
from mucudnn.torch.splitting import norm_parts as parts
from mucudnn.torch.splitting.rewriting import Rewriting

__all__ = ["with_norms_in_parts"]

_WITH_RUNNING = "aten._native_batch_norm_legit_functional.default"
_WITHOUT_RUNNING = "aten._native_batch_norm_legit.no_stats"
_BACKWARD = "aten.native_batch_norm_backward.default"

_KEPT = NodeTraits(recomputable=False)
"""Of statistics: they are not merged twice."""

_TYPES = frozenset({torch.float32, torch.float64})
"""In which parts are computed; what is narrower stays whole."""


def with_norms_in_parts(lowered: Lowered) -> Lowered:
    """The same step with batch norms of images in training as several nodes each."""
    return _Writer(lowered).rewritten()


class _Writer(Rewriting):
    def __init__(self, lowered: Lowered) -> None:
        super().__init__(lowered)
        self._variances: dict[str, tuple[str, float]] = {}
        """Mean of a norm in parts -> its variance, and what is added to that."""

    def write(self, node: Node) -> None:
        """A node, or what is in its place."""
        call = self.calls[node.name]
        done = False
        if node.op in (_WITH_RUNNING, _WITHOUT_RUNNING):
            done = self._forward(node, call)
        elif node.op == _BACKWARD:
            done = self._backward(node, call)
        if not done:
            self.nodes.append(node)

    def _forward(self, node: Node, call: Call) -> bool:
        x, weight, bias, *rest = call.args
        running = rest[:-3] or [None, None]
        training, momentum, eps = rest[-3:]
        given = self._names(node, (x, weight, bias, *running))
        known = training is True and isinstance(momentum, float)
        if 0 not in call.results or not known or not self._alike(given):
            return False
        results = dict(zip(call.results, node.outputs, strict=True))
        image, weights, biases, *ran = given
        channels = self.layouts[image].shape[1]
        left = self._declared(f"{node.name}:left", image, (3, channels))
        for path, kind in ((1, "mean"), (2, "inverse")):
            if path not in results:
                name = f"{node.name}:{kind}"
                results[path] = self._declared(name, image, (channels,))
        variance = self._declared(f"{node.name}:variance", image, (channels,))
        self._variances[results[1]] = variance, eps
        self._add(node, parts.SUMS, parts.sums, (), [image], {None: left})
        merged = {0: results[1], 1: results[2], 2: variance}
        merged |= {path: results[path] for path in (3, 4) if path in results}
        options = momentum, eps
        self._add(node, parts.MERGE, parts.merged, options, [*ran, [left]], merged)
        applied = [image, results[1], variance, weights, biases]
        made = {None: results[0]}
        self._add(node, parts.APPLY, parts.normalised, (eps,), applied, made)
        return True

    def _backward(self, node: Node, call: Call) -> bool:
        names = self._names(node, call.args[:7])
        gradient, image, weights, _, _, mean, inverse = names
        known = self._variances.get(mean) if mean is not None else None
        if known is None or not self._alike([gradient, image, weights]):
            return False
        results = dict(zip(call.results, node.outputs, strict=True))
        sizes = self.layouts[image].shape
        for path, kind in ((1, "weight"), (2, "bias")):
            if path not in results:
                name = f"{node.name}:{kind}"
                results[path] = self._declared(name, image, sizes[1:2])
        variance, eps = known
        read = [gradient, image, mean, variance]
        sums = {0: results[1], 1: results[2]}
        self._add(node, parts.GRAD_SUMS, parts.grad_sums, (eps,), read, sums)
        if 0 not in results:
            return True
        count = torch.Size(sizes).numel() // sizes[1]
        read = [gradient, image, mean, inverse, results[1], results[2], weights]
        made = {None: results[0]}
        self._add(node, parts.GRAD_APPLY, parts.grad_applied, (count,), read, made)
        return True

    def _names(self, node: Node, values: Sequence[Any]) -> list[Any]:
        """Tensors among arguments, and None for those that are not given."""
        return [
            node.inputs[value.index] if isinstance(value, Operand) else None
            for value in values
        ]

    def _alike(self, names: Sequence[str | None]) -> bool:
        """Whether tensors, the first one there, are in one type that is computed in."""
        kinds = {self.layouts[name].dtype for name in names if name is not None}
        return names[0] is not None and len(kinds) == 1 and kinds <= _TYPES

    def _declared(self, name: str, like: str, sizes: tuple[int, ...]) -> str:
        layout = self.layouts[like]
        whole = torch.empty(sizes, dtype=layout.dtype, device="meta")
        self.layouts[name] = replace(Layout.of(whole), device=layout.device)
        nbytes = whole.numel() * whole.element_size()
        self.tensors[name] = TensorSpec(name, (nbytes,), "uint8")
        return name

    def _add(
        self,
        node: Node,
        op: str,
        function: Any,
        options: tuple[Any, ...],
        tensors: Sequence[Any],
        results: Mapping[Any, str],
    ) -> None:
        """A part: a function of options, then tensors, the last perhaps of parts."""
        inputs: list[str] = []
        args: list[Any] = []
        for tensor in tensors:
            for name in tensor if isinstance(tensor, list) else [tensor]:
                if name is not None and name not in inputs:
                    inputs.append(name)
            if isinstance(tensor, list):
                args.append([Operand(inputs.index(name)) for name in tensor])
            else:
                args.append(None if tensor is None else Operand(inputs.index(tensor)))
        name = f"{node.name}:{op.partition(':')[2]}"
        self.calls[name] = Call(
            function, (*options, *args), MappingProxyType({}), tuple(results)
        )
        outputs = tuple(results.values())
        traits = _KEPT if op == parts.MERGE else PLAIN
        self.nodes.append(
            Node(name, op, tuple(inputs), outputs, phase=node.phase, traits=traits)
        )
