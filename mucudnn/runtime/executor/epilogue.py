"""A convolution with bias and ReLU: one kernel, or its plan's and another behind."""

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
    """What a convolution does as well, by itself: in place, on its result.

    Args:
        graph: Where the convolution is.
        node: It, reading x, w and a bias.
    """
    y, op = node.outputs[0], EPILOGUE[1]
    name = f"{node.name}:{op}"
    return make_node(graph.tensors, name, op, (y, node.inputs[2]), (y,))


def with_epilogue(
    backend: Backend,
    plan: ConvPlan,
    operands: Sequence[Any],
    finish: Callable[[], tuple[Call, object]],
) -> Call:
    """The call of a convolution with its bias and ReLU.

    Args:
        backend: Computes.
        plan: Of the convolution alone.
        operands: x, w, bias, y and the workspace of the plan.
        finish: Makes the call of bias and ReLU by themselves, if they have to be.
    """
    x, w, bias, y, workspace = operands
    if backend.epilogues is not None:
        whole = backend.epilogues.bind(plan, x, w, bias, y, workspace)
        if whole is not None:
            return whole
    return _apart(backend, plan, operands, finish()[0])


def ways_to_run(
    backend: Backend,
    plan: ConvPlan,
    graph: Graph,
    operands: Sequence[Array],
    workspace: Buffer | None,
) -> tuple[Call, ...]:
    """A convolution with bias and ReLU in one call and in two, if it can be in one.

    Args:
        backend: Computes.
        plan: Of the convolution alone.
        graph: Of one node: bias and ReLU, which are done in place.
        operands: x, w, y and the bias.
        workspace: Of the plan.
    """
    x, w, y, bias = operands
    assert backend.epilogues is not None
    whole = backend.epilogues.bind(plan, x, w, bias, y, workspace)
    if whole is None:
        return ()
    (node,) = graph.nodes
    (image, _), _, attrs = operands_of(graph, node)
    seen = y.reshape(image.shape)
    behind = backend.kernels[node.op].call([seen, bias], [seen], attrs, None)
    apart = _apart(backend, plan, (x, w, bias, y, workspace), behind)
    return whole, apart


def _apart(
    backend: Backend, plan: ConvPlan, operands: Sequence[Any], behind: Call
) -> Call:
    x, w, _, y, workspace = operands
    runner = backend.bind(plan)

    def call() -> None:
        runner.run(x, w, y, workspace, False)
        behind()

    return call
