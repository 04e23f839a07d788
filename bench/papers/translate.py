"""Any network of the library as the layers that SuperNeurons' account speaks of.

A bias is part of its convolution or classifier, a reshape is nothing, counts of right
answers are no layers, and where a tensor has several readers there is a FORK. What the
graph computes last of a branch point is its branch 0, so that the route keeps the
graph's order.
"""

import math
from dataclasses import replace

from bench.papers.layers import Kind, Layer, LayerBuilder, Network
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.tensor import Role
from mucudnn.models import IMAGE

__all__ = ["translate"]

_KINDS = {
    "conv": Kind.CONV,
    "matmul": Kind.FC,
    "max_pool": Kind.POOL,
    "avg_pool": Kind.POOL,
    "relu": Kind.ACT,
    "batch_norm": Kind.BN,
    "lrn": Kind.LRN,
    "dropout": Kind.DROPOUT,
    "pad": Kind.PADDING,
    "softmax_cross_entropy": Kind.SOFTMAX,
    "add": Kind.JOIN,
    "concat": Kind.CONCAT,
}
_MERGED = frozenset({"bias", "reshape"})
"""Their result is their input's."""

_NO_LAYERS = frozenset({"accuracy"})
_COUNTED = frozenset({Kind.CONV, Kind.FC})
"""Whose parameters the account counts."""


def translate(graph: Graph, name: str) -> Network:
    """A forward graph's layers.

    Args:
        graph: With one image and one loss.
        name: As printed.

    Raises:
        ValueError: It holds an operation that the account does not know, or a second
            loss.
    """
    losses = [node for node in graph.nodes if node.op == "softmax_cross_entropy"]
    if len(losses) != 1:
        raise ValueError(f"{name} has {len(losses)} losses; the account knows one")
    draft = _Draft(graph, name)
    for node in graph.nodes:
        draft.take(node)
    return draft.build()


class _Draft:
    """Layers with tensors that several others may read."""

    def __init__(self, graph: Graph, name: str) -> None:
        self._graph, self._name = graph, name
        self._of = {IMAGE: LayerBuilder.DATA}
        self._layers: dict[str, Layer] = {}

    def take(self, node: Node) -> None:
        """Add a node's layer, if it is one."""
        if node.op in _NO_LAYERS:
            return
        out = node.outputs[0]
        inputs = tuple(self._of[t] for t in node.inputs if t in self._of)
        if node.op in _MERGED:
            (self._of[out],) = inputs
            if node.op == "bias":
                layer = self._layers[inputs[0]]
                self._layers[layer.name] = replace(layer, biases=self._counted(node))
            return
        if node.op not in _KINDS:
            raise ValueError(f"{self._name}: the account does not know {node.op!r}")
        kind = _KINDS[node.op]
        # A loss is a number; its layer's output are the probabilities.
        like = node.inputs[0] if kind is Kind.SOFTMAX else out
        shape = self._graph.tensors[like].shape[1:]
        weights = self._counted(node) if kind in _COUNTED else 0
        self._layers[out] = Layer(out, kind, inputs, (out,), shape, weights)
        self._of[out] = out

    def build(self) -> Network:
        """The layers, with a FORK behind every tensor that several of them read."""
        readers: dict[str, list[str]] = {}
        for layer in self._layers.values():
            for tensor in layer.inputs:
                readers.setdefault(tensor, []).append(layer.name)
        if len(readers[LayerBuilder.DATA]) > 1:
            raise ValueError(f"{self._name}: several layers read the image")
        made: list[Layer] = []
        for layer in self._layers.values():
            inputs = tuple(
                _branch(t, readers[t].index(layer.name), len(readers[t]))
                for t in layer.inputs
            )
            made.append(replace(layer, inputs=inputs))
            count = len(readers.get(layer.name, ()))
            if count > 1:
                outputs = tuple(f"{layer.name}/{branch}" for branch in range(count))
                name = f"{layer.name}/fork"
                made.append(Layer(name, Kind.FORK, (layer.name,), outputs, layer.shape))
        image = self._graph.tensors[IMAGE].shape[1:]
        return Network(self._name, image, tuple(made))

    def _counted(self, node: Node) -> int:
        """Values of a node's parameters."""
        specs = (self._graph.tensors[name] for name in node.inputs)
        return sum(
            math.prod(spec.shape) for spec in specs if spec.role is Role.PARAMETER
        )


def _branch(tensor: str, reader: int, readers: int) -> str:
    """What a reader reads of a tensor; the last one's branch is 0."""
    return tensor if readers == 1 else f"{tensor}/{(reader + 1) % readers}"
