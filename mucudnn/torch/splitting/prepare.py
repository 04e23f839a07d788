"""Rewrite a graph so that it can be cut: the same values by other operations.

* Tensors filled with a constant do not read the tensor that gives their shape.
* A mean loss of classes divides by a count over the whole batch. The count is computed
  first, from labels alone; the loss is summed; the sum is divided.
* For strips, batch norms in training become several nodes (`Norms`), and the
  gradients of images do not read the images (`ShapeOperands`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.tensor import TensorSpec
from mucudnn.ir.traits import PLAIN, NodeTraits
from mucudnn.torch.lowering.lowered import Call, Layout, Lowered, Operand
from mucudnn.torch.splitting.axes import Rule, Site
from mucudnn.torch.splitting.batch_rules import COUNTED_LOSSES, MEAN, SUM, along


class GraphRewriter(ABC):
    """Writes the nodes of a graph anew, with additional tensors and calls."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        self.nodes: list[Node] = []
        self.tensors: dict[str, TensorSpec] = dict(lowered.graph.tensors)
        self.calls: dict[str, Call] = dict(lowered.calls)
        self.layouts: dict[str, Layout] = dict(lowered.layouts)

    @abstractmethod
    def write(self, node: Node) -> None:
        """Append a node, or its replacement."""

    def rewritten(self) -> Lowered:
        """Return the step with all nodes rewritten."""
        graph = self._lowered.graph
        for node in graph.nodes:
            self.write(node)
        graph = Graph(self.tensors, tuple(self.nodes), graph.outputs)
        return replace(
            self._lowered, graph=graph, calls=self.calls, layouts=self.layouts
        )

    def declare(self, name: str, like: str, shape: tuple[int, ...]) -> str:
        """Declare a contiguous tensor of another one's type and device."""
        layout = self.layouts[like]
        whole = torch.empty(shape, dtype=layout.dtype, device="meta")
        self.layouts[name] = replace(Layout.of(whole), device=layout.device)
        nbytes = whole.numel() * whole.element_size()
        self.tensors[name] = TensorSpec(name, (nbytes,), "uint8")
        return name

    def add(
        self,
        node: Node,
        suffix: str,
        op: str,
        call: Call,
        inputs: Sequence[str],
        outputs: Sequence[str],
        traits: NodeTraits = PLAIN,
    ) -> None:
        """Append one of the nodes that replace a node."""
        name = f"{node.name}:{suffix}"
        self.calls[name] = call
        self.nodes.append(
            Node(
                name, op, tuple(inputs), tuple(outputs), phase=node.phase, traits=traits
            )
        )


def renumbered(
    node: Node, args: Sequence[Any]
) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return the inputs that some arguments of a node name, and these arguments."""
    used = dict.fromkeys(a.index for a in args if isinstance(a, Operand))
    place = {index: i for i, index in enumerate(used)}
    found = (Operand(place[a.index]) if isinstance(a, Operand) else a for a in args)
    return tuple(node.inputs[index] for index in used), tuple(found)


def _is_contiguous(layout: Layout) -> bool:
    plain = torch.empty(layout.shape, device="meta").stride()
    return layout.stride == tuple(plain)


_FILLED: Mapping[str, Callable[[tuple[Any, ...]], Any]] = MappingProxyType(
    {
        "aten.ones_like.default": lambda args: 1,
        "aten.zeros_like.default": lambda args: 0,
        "aten.full_like.default": lambda args: args[1],
        "aten.new_zeros.default": lambda args: 0,
        "aten.new_ones.default": lambda args: 1,
        "aten.new_full.default": lambda args: args[2],
    }
)
"""Operation -> the value that it fills a tensor with, given its arguments."""

_UNFILLED = frozenset({"aten.empty_like.default", "aten.new_empty.default"})


class FillsAndLosses(GraphRewriter):
    """Rewrites constant tensors and mean losses of classes."""

    def write(self, node: Node) -> None:
        """Append a node, or its replacement."""
        call = self.calls[node.name]
        if (
            node.op in COUNTED_LOSSES
            and call.args[3:4] in ((), (MEAN,))
            and not call.kwargs
            and call.results[:1] == (0,)
        ):
            self._loss(node, call)
        elif (
            (node.op in _FILLED or node.op in _UNFILLED)
            and _is_contiguous(self.layouts[node.outputs[0]])
            and not any(isinstance(a, Operand) for a in call.args[1:])
        ):
            self._fill(node, call)
        else:
            self.nodes.append(node)

    def _fill(self, node: Node, call: Call) -> None:
        layout = self.layouts[node.outputs[0]]
        kind = {"dtype": layout.dtype, "device": layout.device}
        sizes = list(layout.shape)
        function, args = torch.ops.aten.empty.memory_format, [sizes]
        if node.op in _FILLED:
            function = torch.ops.aten.full.default
            args.append(_FILLED[node.op](call.args))
        self.calls[node.name] = Call(function, tuple(args), kind, (None,))
        self.nodes.append(replace(node, inputs=()))

    def _loss(self, node: Node, call: Call) -> None:
        """Write a mean loss as the count of its labels, the sum, and the division."""
        scores, labels, weights, _, ignored = (*call.args, -100)[:5]
        loss = node.outputs[0]
        if len(node.outputs) > 1:
            count = node.outputs[1]
        else:
            count = self.declare(f"{node.name}:count", loss, ())
        total = self.declare(f"{node.name}:sum", loss, ())
        read = [
            node.inputs[a.index] for a in (labels, weights) if isinstance(a, Operand)
        ]
        given = [Operand(0), Operand(1) if isinstance(weights, Operand) else None]
        dtype = self.layouts[loss].dtype
        counted = Call(_label_count, (*given, ignored, dtype), {}, (None,))
        self.add(node, "count", f"{node.op}:count", counted, read, [count])
        args = (scores, labels, weights, SUM, ignored)
        summed = replace(call, args=args, results=(0,))
        self.add(node, "sums", node.op, summed, node.inputs, [total])
        divided = Call(torch.ops.aten.div.Tensor, (Operand(0), Operand(1)), {}, (None,))
        self.add(node, "mean", f"{node.op}:mean", divided, [total, count], [loss])


def _label_count(
    labels: torch.Tensor, weights: torch.Tensor | None, ignored: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the number of labels that are not ignored, or the sum of their weights."""
    counts = labels != ignored
    if weights is None:
        return counts.sum().to(dtype)
    known = torch.where(counts, labels, 0)
    return torch.where(counts, weights[known], 0).sum()


# Batch normalization by strips.
#
# Forward: each strip computes its statistics, which are merged (Chan, Golub and
# LeVeque, 1979); then each strip is normalized by the merged statistics. Backward:
# gradients of parameters are sums over strips, and a strip's own gradient follows from
# them. The kernels are PyTorch's for given statistics.


def sums(x: torch.Tensor) -> torch.Tensor:
    """Return of each channel the mean, the sum of squared deviations, and the count."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    variance, mean = torch.var_mean(x, axes, correction=0)
    count = x.numel() // x.shape[1]
    return torch.stack([mean, variance.mul_(count), torch.full_like(mean, count)])


def merged_parts(
    momentum: float,
    eps: float,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    parts: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """Merge the statistics of all strips.

    Returns:
        Mean, reciprocal of the deviation, variance, and new running statistics.
    """
    means, squares, counts = torch.stack(list(parts)).unbind(1)
    count = counts.sum(0)
    mean = (means * counts).sum(0).div_(count)
    beside = (means - mean).square_().mul_(counts).add_(squares).sum(0)
    variance = beside / count
    inverse = (variance + eps).rsqrt_()
    if running_mean is None or running_var is None:
        return mean, inverse, variance, None, None
    ran = (
        running_mean.lerp(mean, momentum),
        running_var.lerp(beside / (count - 1), momentum),
    )
    return mean, inverse, variance, *ran


def normalised(
    eps: float,
    x: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Normalize a strip by the merged statistics."""
    found: torch.Tensor = torch.ops.aten._native_batch_norm_legit_no_training(
        x, weight, bias, mean, variance, 0.0, eps
    )[0]
    return found


def grad_sums(
    eps: float,
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a strip's summands of the gradients of weights and biases."""
    _, weight, bias = torch.ops.aten.native_batch_norm_backward(
        *(gradient, x, None, mean, variance, None, None, False, eps),
        [False, True, True],
    )
    return weight, bias


def grad_applied(
    count: int,
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    of_weight: torch.Tensor,
    of_bias: torch.Tensor,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient of a strip, given the element count of a whole channel."""
    sizes = [1, -1, *[1] * (x.dim() - 2)]
    slope = inverse if weight is None else inverse * weight
    along = (inverse * of_weight).div_(-count)
    offset = (slope * of_bias).div_(-count)
    found = x - mean.view(sizes)
    torch.addcmul(gradient, found, along.view(sizes), out=found)
    result: torch.Tensor = torch.addcmul(
        offset.view(sizes), found, slope.view(sizes), out=found
    )
    return result


def _unless_channels(site: Site, axis: int) -> int | None:
    return None if axis == 1 else axis


NORMS: Mapping[str, Rule] = MappingProxyType(
    {
        "batch_norm:sums": along(_unless_channels, 0, sums=(None,), gathered=True),
        "batch_norm:apply": along(_unless_channels, 1),
        "batch_norm:grad_sums": along(_unless_channels, 1, 2, sums=(0, 1)),
        "batch_norm:grad_apply": along(_unless_channels, 1, 2),
    }
)
"""Operation -> its rule; the merge of statistics stays whole."""

_WITH_RUNNING = "aten._native_batch_norm_legit_functional.default"

_WITHOUT_RUNNING = "aten._native_batch_norm_legit.no_stats"

_BACKWARD = "aten.native_batch_norm_backward.default"

_NOT_RECOMPUTED = NodeTraits(recomputable=False)
"""Traits of merged statistics: running statistics must not be updated twice."""

_TYPES = frozenset({torch.float32, torch.float64})
"""Types of batch norms that are split; those of lower precision stay whole."""


class Norms(GraphRewriter):
    """Rewrites batch norms of images in training as several nodes each."""

    def __init__(self, lowered: Lowered) -> None:
        super().__init__(lowered)
        self._variances: dict[str, tuple[str, float]] = {}
        """Mean of a split norm -> its variance, and the epsilon."""

    def write(self, node: Node) -> None:
        """Append a node, or its replacement."""
        call = self.calls[node.name]
        done = False
        if node.op in (_WITH_RUNNING, _WITHOUT_RUNNING):
            done = self._forward(node, call)
        elif node.op == _BACKWARD:
            done = self._backward(node, call)
        if not done:
            self.nodes.append(node)

    def _forward(self, node: Node, call: Call) -> bool:
        """Write a norm as nodes; return whether it can be."""
        x, weight, bias, *rest = call.args
        running = rest[:-3] or [None, None]
        training, momentum, eps = rest[-3:]
        given = self._names(node, (x, weight, bias, *running))
        known = training is True and isinstance(momentum, float)
        if 0 not in call.results or not known or not self._have_one_type(given):
            return False
        results = dict(zip(call.results, node.outputs, strict=True))
        image, weights, biases, *ran = given
        channels = self.layouts[image].shape[1]
        # Three nodes: sums of each strip, statistics of all of them, and the result.
        sums_of_strip = self.declare(f"{node.name}:left", image, (3, channels))
        for path, kind in ((1, "mean"), (2, "inverse")):
            if path not in results:
                results[path] = self.declare(f"{node.name}:{kind}", image, (channels,))
        variance = self.declare(f"{node.name}:variance", image, (channels,))
        self._variances[results[1]] = variance, eps
        self._add(node, "sums", sums, (), [image], {None: sums_of_strip})
        merged = {0: results[1], 1: results[2], 2: variance}
        merged |= {path: results[path] for path in (3, 4) if path in results}
        read = [*ran, [sums_of_strip]]
        self._add(node, "merge", merged_parts, (momentum, eps), read, merged)
        read = [image, results[1], variance, weights, biases]
        self._add(node, "apply", normalised, (eps,), read, {None: results[0]})
        return True

    def _backward(self, node: Node, call: Call) -> bool:
        """Write the gradient of a split norm as nodes; return whether it is one."""
        gradient, image, weights, _, _, mean, inverse = self._names(node, call.args[:7])
        known = self._variances.get(mean) if mean is not None else None
        if known is None or not self._have_one_type([gradient, image, weights]):
            return False
        results = dict(zip(call.results, node.outputs, strict=True))
        shape = self.layouts[image].shape
        for path, kind in ((1, "weight"), (2, "bias")):
            if path not in results:
                results[path] = self.declare(f"{node.name}:{kind}", image, shape[1:2])
        variance, eps = known
        read = [gradient, image, mean, variance]
        summed = {0: results[1], 1: results[2]}
        self._add(node, "grad_sums", grad_sums, (eps,), read, summed)
        if 0 in results:
            count = torch.Size(shape).numel() // shape[1]
            read = [gradient, image, mean, inverse, results[1], results[2], weights]
            made = {None: results[0]}
            self._add(node, "grad_apply", grad_applied, (count,), read, made)
        return True

    def _names(self, node: Node, values: Sequence[Any]) -> list[Any]:
        """Return the tensors among arguments; None for those that are not given."""
        return [
            node.inputs[value.index] if isinstance(value, Operand) else None
            for value in values
        ]

    def _have_one_type(self, names: Sequence[str | None]) -> bool:
        """Return whether the first tensor is given and all have one supported type."""
        types = {self.layouts[name].dtype for name in names if name is not None}
        return names[0] is not None and len(types) == 1 and types <= _TYPES

    def _add(
        self,
        node: Node,
        kind: str,
        function: Any,
        options: tuple[Any, ...],
        tensors: Sequence[Any],
        results: Mapping[Any, str],
    ) -> None:
        """Append a node that calls a function of options and tensors.

        Tensors may be None, and the last one a list: of the results of all strips.
        """
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
        call = Call(function, (*options, *args), MappingProxyType({}), tuple(results))
        traits = _NOT_RECOMPUTED if kind == "merge" else PLAIN
        op, outputs = f"batch_norm:{kind}", [*results.values()]
        self.add(node, kind, op, call, inputs, outputs, traits)


# Gradients without the operands of which they read the shape alone.
#
# PyTorch passes the images to the gradient of images, which uses only their shape. A
# strip of the gradient would have to wait for all of them.


_IMAGE = 1
"""Position of the images among the arguments of gradients."""

_POOLS = frozenset(
    f"aten.{kind}_backward.default"
    for kind in (
        *("avg_pool2d", "avg_pool3d"),
        *("max_pool2d_with_indices", "max_pool3d_with_indices"),
    )
)

_CONVOLUTION = "aten.convolution_backward.default"

_TRANSPOSED = 7
"""Position of the flag `transposed` among a convolution gradient's arguments."""


@dataclass(frozen=True, slots=True)
class ShapedGradient:
    """A call of `gradient_of_shape`; `args` are PyTorch's, without the images."""

    function: Any
    sizes: tuple[int, ...]
    args: tuple[Any, ...]

    @classmethod
    def of(cls, call: Call) -> "ShapedGradient | None":
        """Return the parts of a call; None if it calls another function."""
        if call.function is not gradient_of_shape:
            return None
        function, sizes, *args = call.args
        return cls(function, tuple(sizes), tuple(args))

    def call(self, whole: Call) -> Call:
        """Return another call with this function and these arguments."""
        args = (self.function, list(self.sizes), *self.args)
        return replace(whole, function=gradient_of_shape, args=args, into=None)


def gradient_of_shape(
    function: Any, sizes: list[int], gradient: torch.Tensor, *args: Any
) -> Any:
    """Compute a gradient of images from their shape."""
    return function(gradient, gradient.new_zeros(()).expand(sizes), *args)


class ShapeOperands(GraphRewriter):
    """Rewrites gradients of images so that they do not read the images.

    The bias's gradient of a transposed convolution becomes a sum of its own: the rows
    that strips of the filter's gradient read overlap.
    """

    def write(self, node: Node) -> None:
        """Append a node, or its replacement."""
        call = self.calls[node.name]
        convolution = node.op == _CONVOLUTION
        of_images = node.op in _POOLS or (convolution and call.results == (0,))
        if of_images and self._reads_shape_alone(node, call):
            sizes = self.layouts[node.inputs[call.args[_IMAGE].index]].shape
            others = *call.args[:_IMAGE], *call.args[_IMAGE + 1 :]
            inputs, args = renumbered(node, others)
            self.calls[node.name] = ShapedGradient(call.function, sizes, args).call(
                call
            )
            self.nodes.append(replace(node, inputs=inputs))
        elif convolution and call.results == (1, 2) and call.args[_TRANSPOSED] is True:
            self._separate_bias(node, call)
        else:
            self.nodes.append(node)

    def _reads_shape_alone(self, node: Node, call: Call) -> bool:
        """Return whether the images are contiguous, and no other operand too."""
        image = call.args[_IMAGE]
        others = [*call.args[:_IMAGE], *call.args[_IMAGE + 1 :]]
        if not isinstance(image, Operand) or image in others:
            return False
        return _is_contiguous(self.layouts[node.inputs[image.index]])

    def _separate_bias(self, node: Node, call: Call) -> None:
        """Write the gradients of filters and of a bias as two nodes."""
        filters, bias = node.outputs
        self.calls[node.name] = replace(
            call, args=(*call.args[:-1], [False, True, False]), results=(1,)
        )
        self.nodes.append(replace(node, outputs=(filters,)))
        gradient = node.inputs[call.args[0].index]
        rank = len(self.layouts[gradient].shape)
        axes = [axis for axis in range(rank) if axis != 1]
        summed = torch.ops.aten.sum.dim_IntList
        call = Call(summed, (Operand(0), axes), MappingProxyType({}), (None,))
        self.add(node, "bias", str(summed), call, [gradient], [bias])
