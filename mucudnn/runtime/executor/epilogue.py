"""Bind a convolution with bias and ReLU: as one fused kernel, or as two launches."""

from collections.abc import Callable, Sequence
from typing import Any

from mucudnn.backends.base import Array, Backend, Buffer
from mucudnn.ir.channels_last import operands_of
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.operations import EPILOGUE, make_node

__all__ = ["bias_and_relu_of", "ways_to_run", "with_epilogue"]

Call = Callable[[], None]


def bias_and_relu_of(graph: Graph, node: Node) -> Node:
    """Return the in-place bias-and-ReLU node that a convolution node contains."""
    y, op = node.outputs[0], EPILOGUE[1]
    name = f"{node.name}:{op}"
    return make_node(graph.tensors, name, op, (y, node.inputs[2]), (y,))


def with_epilogue(
    backend: Backend,
    plan: ConvPlan,
    operands: Sequence[Any],
    finish: Callable[[], tuple[Call, object]],
) -> Call:
    """Bind a convolution with its bias and ReLU to one call.

    `operands` are x, w, bias, y and the workspace of `plan`, the plan of the
    convolution alone. `finish` binds bias and ReLU as a separate call, if no fused
    kernel exists.
    """
    if backend.epilogues is not None:
        fused = backend.epilogues.bind(plan, *operands)
        if fused is not None:
            return fused
    return _unfused(backend, plan, operands, finish()[0])


def ways_to_run(
    backend: Backend,
    plan: ConvPlan,
    graph: Graph,
    operands: Sequence[Array],
    workspace: Buffer | None,
) -> tuple[Call, ...]:
    """Return the fused and the separate call of conv + bias + ReLU; () if unfusable.

    `graph` has one node, bias and ReLU in place; `operands` are x, w, y and the bias.
    """
    x, w, y, bias = operands
    assert backend.epilogues is not None
    fused = backend.epilogues.bind(plan, x, w, bias, y, workspace)
    if fused is None:
        return ()
    (node,) = graph.nodes
    (image, _), _, attrs = operands_of(graph, node)
    seen = y.reshape(image.shape)
    behind = backend.kernels[node.op].call([seen, bias], [seen], attrs, None)
    return fused, _unfused(backend, plan, (x, w, bias, y, workspace), behind)


def _unfused(
    backend: Backend, plan: ConvPlan, operands: Sequence[Any], behind: Call
) -> Call:
    x, w, _, y, workspace = operands
    runner = backend.bind(plan)

    def call() -> None:
        runner.run(x, w, y, workspace, False)
        behind()

    return call
