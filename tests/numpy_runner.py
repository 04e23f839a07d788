"""Graphs executed with a backend's kernels, as naively as can be.

Every tensor is an array of its own, full of NaN until it is written, except where the
graph says that it shares bytes with another. Convolutions take whatever algorithm needs
the least workspace.
"""

import math
from collections.abc import Mapping

import numpy as np

from mucudnn.backends import Backend
from mucudnn.ir.channels_last import operands_of
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.tensor import TensorSpec


def execute(
    backend: Backend, graph: Graph, feeds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Every tensor of a graph; what it mutates among the feeds is changed."""
    values = dict(feeds)
    for node in graph.nodes:
        for name in node.outputs:
            values[name] = _array(graph.tensors[name], values)
        inputs = [values[name] for name in node.inputs]
        outputs = [values[name] for name in node.outputs]
        if node.op == "conv":
            _convolve(backend, node, inputs, outputs[0])
        elif not node.traits.view:
            kernel = backend.kernels[node.op]
            reads, writes, attrs = operands_of(graph, node)
            nbytes = kernel.workspace(reads, writes, attrs)
            workspace = backend.device.allocate(nbytes) if nbytes else None
            seen = [values[s.name].reshape(s.shape) for s in (*reads, *writes)]
            count = len(reads)
            kernel.run(seen[:count], seen[count:], attrs, workspace)
    return values


def _array(spec: TensorSpec, values: Mapping[str, np.ndarray]) -> np.ndarray:
    if spec.alias is not None:
        flat = values[spec.alias].reshape(-1)
        first = spec.offset // flat.itemsize
        return flat[first : first + math.prod(spec.shape)].reshape(spec.shape)
    if spec.dtype.startswith("float"):
        return np.full(spec.shape, np.nan, spec.dtype)
    return np.empty(spec.shape, spec.dtype)


def _convolve(
    backend: Backend, node: Node, inputs: list[np.ndarray], out: np.ndarray
) -> None:
    problem = node.attrs["problem"]
    algorithms = backend.conv.algorithms(problem)
    algo, nbytes = min(algorithms, key=lambda named: named[1])
    workspace = backend.device.allocate(nbytes)
    a, b, *total = inputs
    more = bool(total)
    backend.conv.run(problem, algo, a, b, out, workspace, accumulate=more)
