"""Append the backward pass to a forward graph: one rule an operation.

The gradients of a fork are summed, in place where the first of them belongs to nobody
else. Nothing is computed for tensors that no parameter feeds.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.graph import Graph, Node, Phase, Role, TensorSpec

__all__ = ["LOSS_SCALE", "RULES", "Tape", "training_graph"]

LOSS_SCALE = "loss_scale"
"""Name of the scalar input that the loss's own gradient is."""


def training_graph(
    forward: Graph, loss: str | None = None, *, loss_scale: float | None = 1.0
) -> Graph:
    """The forward graph followed by the gradients of a loss.

    Args:
        forward: A network.
        loss: A scalar of it; the first output if not given.
        loss_scale: The gradient of the loss itself. None makes it an input called
            `loss_scale`, for mixed precision.

    Returns:
        The training graph; its `gradients` name that of every parameter the loss
        depends on. The forward graph's outputs stay its outputs.

    Raises:
        ValueError: The loss is no scalar of the graph.
        PlanningError: An operation on the way has no gradient.
    """
    loss = forward.outputs[0] if loss is None else loss
    if loss not in forward.producers or forward.tensors[loss].shape != ():
        raise ValueError(f"the loss {loss!r} is no scalar that the graph computes")
    tape = Tape(forward)
    tape.seed(loss, loss_scale)
    for node in reversed(forward.nodes):
        if not any(name in tape.gradients for name in node.outputs):
            continue
        rule = RULES.get(node.op)
        if rule is None:
            raise PlanningError(f"operation {node.op!r} ({node.name}) has no gradient")
        rule(tape, node)
    gradients = {
        spec.name: tape.gradients[spec.name]
        for spec in forward.with_role(Role.PARAMETER)
        if spec.name in tape.gradients
    }
    return Graph(
        MappingProxyType(tape.tensors),
        tuple(tape.nodes),
        forward.outputs,
        MappingProxyType(gradients),
        forward.initializers,
    )


class Tape:
    """The graph under construction, and the gradients known so far.

    Attributes:
        tensors: Of the graph.
        nodes: Of the graph.
        gradients: Tensor -> its gradient.
    """

    def __init__(self, forward: Graph) -> None:
        self.tensors: dict[str, TensorSpec] = dict(forward.tensors)
        self.nodes: list[Node] = list(forward.nodes)
        self.gradients: dict[str, str] = {}
        self._wanted = _fed_by_parameters(forward)
        self._shared: set[str] = set()
        self._taken = {*self.tensors, *(node.name for node in self.nodes)}
        self._counts: dict[str, int] = {}

    def seed(self, loss: str, scale: float | None) -> None:
        """Begin with the gradient of the loss."""
        if scale is None:
            spec = TensorSpec(LOSS_SCALE, (), self.tensors[loss].dtype, Role.INPUT)
            self.tensors[LOSS_SCALE] = spec
            self.gradients[loss] = LOSS_SCALE
            self._shared.add(LOSS_SCALE)
            return
        self.emit("fill", (), loss, value=scale)

    def wants(self, tensor: str) -> bool:
        """Whether anything needs the gradient of a tensor."""
        return tensor in self._wanted

    def of(self, node: Node) -> str:
        """The gradient of a node's result."""
        return self.gradients[node.outputs[0]]

    def emit(
        self, op: str, inputs: tuple[str, ...], of: str | tuple[str, ...], **attrs: Any
    ) -> None:
        """Append a node that computes contributions to gradients.

        Args:
            op: The operation.
            inputs: Its inputs.
            of: Tensors whose gradients it contributes to, one an output. What nothing
                needs is computed along only beside something that is needed.
            attrs: Of the node.
        """
        targets = (of,) if isinstance(of, str) else of
        if not any(self.wants(target) for target in targets):
            return
        outputs = tuple(self._declare(target) for target in targets)
        name = self._unique(f"{op}.grad")
        attributes = MappingProxyType(attrs)
        self.nodes.append(Node(name, op, inputs, outputs, attributes, Phase.BACKWARD))
        for target, contribution in zip(targets, outputs, strict=True):
            self._contribute(target, contribution)

    def pass_on(self, of: str, gradient: str) -> None:
        """Let a tensor's gradient be that of another, or contribute to it."""
        if self.wants(of):
            self._shared.add(gradient)
            self._contribute(of, gradient)

    def reshape(self, of: str, gradient: str) -> None:
        """Contribute the same bytes in the tensor's own shape."""
        if not self.wants(of):
            return
        view = self._declare(of, alias=gradient)
        name = self._unique("reshape.grad")
        self.nodes.append(
            Node(name, "reshape", (gradient,), (view,), phase=Phase.BACKWARD)
        )
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
        self.nodes.append(
            Node(
                self._unique("add.grad"), "add", ordered, (total,), phase=Phase.BACKWARD
            )
        )
        self.gradients[of] = total

    def _declare(self, of: str, alias: str | None = None) -> str:
        spec = self.tensors[of]
        name = self._unique(f"d:{of}")
        self.tensors[name] = TensorSpec(
            name, spec.shape, spec.dtype, Role.GRADIENT, alias
        )
        return name

    def _unique(self, name: str) -> str:
        unique = name
        while unique in self._taken:
            self._counts[name] = self._counts.get(name, 0) + 1
            unique = f"{name}.{self._counts[name]}"
        self._taken.add(unique)
        return unique


def _fed_by_parameters(graph: Graph) -> set[str]:
    """Tensors that some parameter has an influence on, parameters included."""
    fed = {spec.name for spec in graph.with_role(Role.PARAMETER)}
    for node in graph.nodes:
        if any(name in fed for name in node.inputs):
            fed.update(node.outputs)
    return fed


Rule = Callable[[Tape, Node], None]


def _conv(tape: Tape, node: Node) -> None:
    """Each of the three kernels is linear in both operands: the other two follow."""
    (a, w), dy = node.inputs, tape.of(node)
    problem: ConvProblem = node.attrs["problem"]

    def turned(direction: Direction) -> ConvProblem:
        return replace(problem, direction=direction)

    to_filter = turned(Direction.BACKWARD_FILTER)
    if problem.direction is Direction.FORWARD:
        tape.emit("conv", (a, dy), w, problem=to_filter)
        tape.emit("conv", (dy, w), a, problem=turned(Direction.BACKWARD_DATA))
    else:  # a transposed convolution: what it takes is the other's output gradient
        tape.emit("conv", (dy, a), w, problem=to_filter)
        tape.emit("conv", (dy, w), a, problem=turned(Direction.FORWARD))


def _bias(tape: Tape, node: Node) -> None:
    x, b = node.inputs
    tape.emit("bias_grad", (tape.of(node),), b)
    tape.pass_on(x, tape.of(node))


def _matmul(tape: Tape, node: Node) -> None:
    (a, b), dy = node.inputs, tape.of(node)
    ta, tb = node.attrs["transpose_a"], node.attrs["transpose_b"]
    if tb:
        tape.emit("matmul", (dy, a), b, transpose_a=True, transpose_b=ta)
    else:
        tape.emit("matmul", (a, dy), b, transpose_a=not ta, transpose_b=False)
    if ta:
        tape.emit("matmul", (b, dy), a, transpose_a=tb, transpose_b=True)
    else:
        tape.emit("matmul", (dy, b), a, transpose_a=False, transpose_b=not tb)


def _from_saved(op: str, *outputs: int) -> Rule:
    """Gradient from dy and saved outputs of the forward node."""

    def rule(tape: Tape, node: Node) -> None:
        saved = tuple(node.outputs[i] for i in outputs)
        tape.emit(op, (tape.of(node), *saved), node.inputs[0], **node.attrs)

    return rule


def _from_output(op: str) -> Rule:
    """Gradient from y and dy: the input may have been overwritten by y."""

    def rule(tape: Tape, node: Node) -> None:
        inputs = (node.outputs[0], tape.of(node))
        tape.emit(op, inputs, node.inputs[0], **node.attrs)

    return rule


def _gelu(tape: Tape, node: Node) -> None:
    tape.emit("gelu_grad", (node.inputs[0], tape.of(node)), node.inputs[0])


def _normalised(op: str) -> Rule:
    def rule(tape: Tape, node: Node) -> None:
        x, gamma, beta = node.inputs[:3]
        _, mean, inv_std = node.outputs
        inputs = (x, tape.of(node), gamma, mean, inv_std)
        kept = ("groups", "eps", "per_element")
        attrs = {k: v for k, v in node.attrs.items() if k in kept and "group" in op}
        tape.emit(op, inputs, (x, gamma, beta), **attrs)

    return rule


def _lrn(tape: Tape, node: Node) -> None:
    (x,), (y,) = node.inputs, node.outputs
    tape.emit("lrn_grad", (x, y, tape.of(node)), x, **node.attrs)


def _dropout(tape: Tape, node: Node) -> None:
    x, step = node.inputs
    tape.emit("dropout", (tape.of(node), step), x, **node.attrs)


def _add(tape: Tape, node: Node) -> None:
    for term in node.inputs:
        tape.pass_on(term, tape.of(node))


def _multiply(tape: Tape, node: Node) -> None:
    a, b = node.inputs
    dy = tape.of(node)
    tape.emit("multiply", (dy, b), a)
    tape.emit("multiply", (dy, a), b)


def _scale(tape: Tape, node: Node) -> None:
    tape.emit("scale", (tape.of(node),), node.inputs[0], **node.attrs)


def _cast(tape: Tape, node: Node) -> None:
    tape.emit("cast", (tape.of(node),), node.inputs[0])


def _concat(tape: Tape, node: Node) -> None:
    dy = tape.of(node)
    shape = tape.tensors[dy].shape
    start = 0
    for part in node.inputs:
        stop = start + tape.tensors[part].shape[1]
        tape.emit(
            "slice",
            (dy,),
            part,
            starts=(0, start, *(0 for _ in shape[2:])),
            stops=(shape[0], stop, *shape[2:]),
        )
        start = stop


def _slice(tape: Tape, node: Node) -> None:
    starts, stops = node.attrs["starts"], node.attrs["stops"]
    shape = tape.tensors[node.inputs[0]].shape
    after = tuple(n - stop for n, stop in zip(shape, stops, strict=True))
    tape.emit("pad", (tape.of(node),), node.inputs[0], before=starts, after=after)


def _pad(tape: Tape, node: Node) -> None:
    before = node.attrs["before"]
    shape = tape.tensors[node.inputs[0]].shape
    stops = tuple(a + n for a, n in zip(before, shape, strict=True))
    tape.emit("slice", (tape.of(node),), node.inputs[0], starts=before, stops=stops)


def _reshape(tape: Tape, node: Node) -> None:
    tape.reshape(node.inputs[0], tape.of(node))


def _softmax_cross_entropy(tape: Tape, node: Node) -> None:
    logits, labels = node.inputs
    inputs = (node.outputs[1], labels, tape.of(node))
    tape.emit("softmax_cross_entropy_grad", inputs, logits)


def _mean_squared_error(tape: Tape, node: Node) -> None:
    prediction, target = node.inputs
    inputs = (prediction, target, tape.of(node))
    tape.emit("mean_squared_error_grad", inputs, prediction)
    tape.emit("mean_squared_error_grad", (target, prediction, tape.of(node)), target)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "add": _add,
        "avg_pool": _from_saved("avg_pool_grad"),
        "batch_norm": _normalised("batch_norm_grad"),
        "bias": _bias,
        "cast": _cast,
        "concat": _concat,
        "conv": _conv,
        "dropout": _dropout,
        "gelu": _gelu,
        "group_norm": _normalised("group_norm_grad"),
        "leaky_relu": _from_output("leaky_relu_grad"),
        "lrn": _lrn,
        "matmul": _matmul,
        "max_pool": _from_saved("max_pool_grad", 1),
        "mean_squared_error": _mean_squared_error,
        "multiply": _multiply,
        "pad": _pad,
        "relu": _from_output("relu_grad"),
        "reshape": _reshape,
        "scale": _scale,
        "sigmoid": _from_output("sigmoid_grad"),
        "slice": _slice,
        "softmax_cross_entropy": _softmax_cross_entropy,
        "tanh": _from_output("tanh_grad"),
        "upsample_bilinear": _from_saved("upsample_bilinear_grad"),
        "upsample_nearest": _from_saved("upsample_nearest_grad"),
    }
)
"""Operation -> what appends its gradient; operations without one end the way back."""
