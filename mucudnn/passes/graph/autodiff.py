"""Append the backward pass to a forward graph: tape and gradient rules.

Nodes are visited in reverse; each appends its gradient by the rule of its operation
(`gradients`) to one flat list (`tape`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.operations import make_node
from mucudnn.ir.tensor import Role, TensorSpec


def training_graph(
    forward: Graph, loss: str | None = None, *, loss_scale: float | None = 1.0
) -> Graph:
    """Return the forward graph followed by the gradients of a loss.

    Args:
        forward: A network.
        loss: A scalar tensor of the network; by default its first output.
        loss_scale: Gradient of the loss itself. None makes it an input called
            `loss_scale`, for mixed precision.

    Returns:
        The training graph; its `gradients` map every parameter the loss depends on to
        the parameter's gradient. The outputs are those of the forward graph.

    Raises:
        ValueError: The loss is not a computed scalar of the graph.
        PlanningError: An operation on the path has no gradient.
    """
    loss = forward.outputs[0] if loss is None else loss
    if loss not in forward.producers or forward.tensors[loss].shape != ():
        raise ValueError(f"the loss {loss!r} is no scalar that the graph computes")
    tape = Tape(forward)
    tape.seed(loss, loss_scale)
    for node in reversed(forward.nodes):
        # Nodes that no gradient reaches do not contribute to the loss.
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
        tape.tensors,
        tuple(tape.nodes),
        forward.outputs,
        gradients,
        forward.initializers,
    )


# Tape for writing the backward pass: nodes and gradients emitted so far.
#
# The gradients of a fork are summed, in place if one of them has no other use. No
# gradient is computed for tensors that do not depend on parameters.


LOSS_SCALE = "loss_scale"
"""Name of the scalar input that holds the loss's own gradient."""


class Tape:
    """A graph under construction, and the gradients of tensors known so far."""

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
        self._append(op, inputs, outputs, attrs)
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


# Gradient rules, one per operation.
#
# A rule appends gradient nodes to a tape. It reads an operation's result rather than
# its input where the input may have been overwritten in place.


Rule = Callable[[Tape, Node], None]


def _conv(tape: Tape, node: Node) -> None:
    # Every kernel is linear in both operands; the other two kernels are its gradients.
    (a, w, *bias), dy = node.inputs, tape.of(node)
    problem: ConvProblem = node.attrs["problem"]
    if bias:  # bias and ReLU are fused: the result tells where the ReLU was active
        (y,) = node.outputs
        dy = tape.emit_within("bias_relu_grad", (y, dy), y, tuple(bias))

    # The input of a transposed convolution is the gradient of an output.
    forward = problem.direction is Direction.FORWARD
    to_filter = problem.with_direction(Direction.BACKWARD_FILTER)
    tape.emit("conv", (a, dy) if forward else (dy, a), w, problem=to_filter)
    other = Direction.BACKWARD_DATA if forward else Direction.FORWARD
    tape.emit("conv", (dy, w), a, problem=problem.with_direction(other))


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


def _rule(op: str, reads: str, of: str = "x0", *, with_attrs: bool = True) -> Rule:
    """Return a rule with one node.

    Args:
        op: Operation of the node.
        reads: Its inputs: `dy`, a forward input (`x0`, `x1`) or result (`y0`, `y1`).
        of: Forward inputs whose gradients it computes.
        with_attrs: Whether the node has the attributes of the forward node.
    """

    def rule(tape: Tape, node: Node) -> None:
        known = {"dy": tape.of(node)}
        known |= {f"x{i}": name for i, name in enumerate(node.inputs)}
        known |= {f"y{i}": name for i, name in enumerate(node.outputs)}
        inputs = tuple(known[operand] for operand in reads.split())
        targets = tuple(known[operand] for operand in of.split())
        tape.emit(op, inputs, targets, **(node.attrs if with_attrs else {}))

    return rule


def _add(tape: Tape, node: Node) -> None:
    for term in node.inputs:
        tape.pass_on(term, tape.of(node))


def _multiply(tape: Tape, node: Node) -> None:
    a, b = node.inputs
    dy = tape.of(node)
    tape.emit("multiply", (dy, b), a)
    tape.emit("multiply", (dy, a), b)


def _concat(tape: Tape, node: Node) -> None:
    dy, axis = tape.of(node), node.attrs["axis"]
    shape = tape.tensors[dy].shape
    before, behind = shape[:axis], shape[axis + 1 :]
    start = 0
    for part in node.inputs:
        stop = start + tape.tensors[part].shape[axis]
        tape.emit(
            "slice",
            (dy,),
            part,
            starts=(*(0 for _ in before), start, *(0 for _ in behind)),
            stops=(*before, stop, *behind),
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


def _mean_squared_error(tape: Tape, node: Node) -> None:
    prediction, target = node.inputs
    inputs = (prediction, target, tape.of(node))
    tape.emit("mean_squared_error_grad", inputs, prediction)
    tape.emit("mean_squared_error_grad", (target, prediction, tape.of(node)), target)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "add": _add,
        "add_relu": lambda tape, node: tape.emit_shared(
            "relu_grad", (node.outputs[0], tape.of(node)), node.inputs
        ),
        "avg_pool": _rule("avg_pool_grad", "dy"),
        "batch_norm": _rule(
            "batch_norm_grad", "x0 dy x1 y1 y2", "x0 x1 x2", with_attrs=False
        ),
        "batch_norm_add_relu": _rule(
            "batch_norm_add_relu_grad",
            "x0 dy y0 x1 y1 y2",
            "x5 x0 x1 x2",
            with_attrs=False,
        ),
        # The ReLU's mask is computed from the input again: the result is not saved.
        "batch_norm_relu": _rule(
            "batch_norm_relu_grad", "x0 dy x1 x2 y1 y2", "x0 x1 x2", with_attrs=False
        ),
        "bias": _bias,
        "bias_relu": _rule("bias_relu_grad", "y0 dy", "x0 x1", with_attrs=False),
        "cast": _rule("cast", "dy"),
        "concat": _concat,
        "conv": _conv,
        "dropout": _rule("dropout", "dy x1"),
        "gelu": _rule("gelu_grad", "x0 dy"),
        "group_norm": _rule("group_norm_grad", "x0 dy x1 y1 y2", "x0 x1 x2"),
        "leaky_relu": _rule("leaky_relu_grad", "y0 dy"),
        "lrn": _rule("lrn_grad", "x0 y0 dy"),
        "matmul": _matmul,
        "max_pool": _rule("max_pool_grad", "dy y1"),
        "mean_squared_error": _mean_squared_error,
        "multiply": _multiply,
        "pad": _pad,
        "relu": _rule("relu_grad", "y0 dy"),
        "reshape": lambda tape, node: tape.reshape(node.inputs[0], tape.of(node)),
        "scale": _rule("scale", "dy"),
        "sigmoid": _rule("sigmoid_grad", "y0 dy"),
        "slice": _slice,
        "softmax_cross_entropy": _rule("softmax_cross_entropy_grad", "y1 x1 dy"),
        "tanh": _rule("tanh_grad", "y0 dy"),
        "to_channels_first": _rule("to_channels_last", "dy"),
        "to_channels_last": _rule("to_channels_first", "dy"),
        "upsample_bilinear": _rule("upsample_bilinear_grad", "dy"),
        "upsample_nearest": _rule("upsample_nearest_grad", "dy"),
    }
)
"""Gradient rule of each operation; operations without one end the backward pass."""
