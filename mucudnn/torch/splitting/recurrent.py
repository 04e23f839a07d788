"""Cut the layers of an LSTM along the batch, which is not the first axis of its memory.

On the CPU a layer of `nn.LSTM` is one operation on tensors of (time, N, features). It
leaves a workspace for its gradients whose size is not proportional to N. For cutting,
the gradients run the layer again and keep no workspace: a slice then takes a share of
the memory in proportion to its samples, and the time of another forward pass.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.ir.graph import Node
from mucudnn.torch.lowering.lowered import Lowered, Operand
from mucudnn.torch.lowering.overloads import lstm_layer
from mucudnn.torch.splitting.axes import Axis, Cut, Rule, Site
from mucudnn.torch.splitting.prepare import GraphRewriter, renumbered

LAYER = "aten.mkldnn_rnn_layer.default"

_BACKWARD = "aten.mkldnn_rnn_layer_backward.default"

_CUT_LAYER, _CUT_BACKWARD = "lstm:layer", "lstm:backward"
"""Operations without a workspace."""

_WORKSPACE = 3
"""Position of the workspace among the results of a layer."""

_SAVED = slice(7, 10)
"""Positions of the layer's results among the arguments of its gradients."""


class LayersWithoutWorkspace(GraphRewriter):
    """Rewrites LSTMs' layers and gradients as operations without a workspace."""

    def __init__(self, lowered: Lowered) -> None:
        super().__init__(lowered)
        readers: dict[str, list[str]] = {}
        for node in lowered.graph.nodes:
            for name in node.inputs:
                readers.setdefault(name, []).append(node.op)
        self._spare = {name for name, ops in readers.items() if set(ops) == {_BACKWARD}}
        """Tensors that only gradients of layers read."""

    def write(self, node: Node) -> None:
        """Append a node, or its replacement."""
        call = self.calls[node.name]
        if node.op == LAYER and _WORKSPACE in call.results:
            results = dict(zip(call.results, node.outputs, strict=True))
            workspace = results.pop(_WORKSPACE)
            if workspace in self._spare:
                del self.tensors[workspace], self.layouts[workspace]
                self.calls[node.name] = replace(call, results=tuple(results))
                kept = tuple(results.values())
                self.nodes.append(replace(node, op=_CUT_LAYER, outputs=kept))
                return
        elif (
            node.op == _BACKWARD
            and isinstance(workspace := call.args[-1], Operand)
            and node.inputs[workspace.index] in self._spare
        ):
            self._write_gradients(node)
            return
        self.nodes.append(node)

    def _write_gradients(self, node: Node) -> None:
        """Append gradients that run the layer again."""
        call = self.calls[node.name]
        given = [*call.args[: _SAVED.start], *call.args[_SAVED.stop : -1]]
        inputs, args = renumbered(node, given)
        self.calls[node.name] = replace(call, function=lstm_gradients, args=args)
        traits = replace(node.traits, recomputable=True)
        made = replace(node, op=_CUT_BACKWARD, inputs=inputs, traits=traits)
        self.nodes.append(made)


def lstm_gradients(*args: Any) -> tuple[torch.Tensor, ...]:
    """Return the gradients of an LSTM's layer, which runs again.

    The arguments are those of PyTorch's operation without the layer's results and
    workspace.
    """
    layer, gradients = args[:7], args[7:10]
    reverse, mode, hidden, layers, biases, train, both, sizes, batch_first = args[10:]
    options = reverse, sizes, mode, hidden, layers, biases, both, batch_first, train
    *results, workspace = lstm_layer(*layer, *options)
    options = reverse, mode, hidden, layers, biases, train, both, sizes, batch_first
    found = torch.ops.aten.mkldnn_rnn_layer_backward.default(
        *layer, *results, *gradients, *options, workspace
    )
    # Both gradients of biases may be one tensor, and sums over slices change them.
    return (*found[:4], found[4].clone(), *found[5:])


def _along_samples(states: tuple[int, ...], sums: tuple[int, ...]) -> Rule:
    """Return the rule of a layer, or of its gradients.

    Args:
        states: Arguments beside the input that have samples: (N, features), and behind
            the gradients of states one of (time, N, features).
        sums: Results that are sums over the samples.
    """

    def rule(site: Site) -> Cut | None:
        if site.axis(0) != Axis(1):
            return None
        read = {
            position: Axis(len(site.shape(position)) - 2)
            for position in (0, *states)
            if site.operand(position) is not None
        }
        outputs = (
            None if path in sums else Axis(len(layout.shape) - 2)
            for path, layout in zip(site.results, site.outputs, strict=True)
        )
        return Cut(site.at(read), tuple(outputs))

    return rule


RECURRENT: Mapping[str, Rule] = MappingProxyType(
    {
        _CUT_LAYER: _along_samples((5, 6), ()),
        _CUT_BACKWARD: _along_samples((5, 6, 7, 8, 9), (1, 2, 3, 4)),
    }
)
"""Operation -> its rule."""
