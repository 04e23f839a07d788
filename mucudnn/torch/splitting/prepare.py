"""Rewrite a graph so that it can be cut: same values by other operations.

What is filled with a constant reads nothing, though PyTorch gives it a tensor to be
like. A classes' loss divides by the whole batch's count: that is counted first, from
labels alone; the loss is summed; the sum is divided.
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
from mucudnn.torch.splitting.axes import Cut, Rule, Site
from mucudnn.torch.splitting.batch_rules import MEAN, SUM, nll_counted


class Rewriting(ABC):
    """What is written so far; it begins with the tensors and calls that there are.

    Args:
        lowered: The step, which stays as it is.
    """

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        self.nodes: list[Node] = []
        self.tensors: dict[str, TensorSpec] = dict(lowered.graph.tensors)
        self.calls: dict[str, Call] = dict(lowered.calls)
        self.layouts: dict[str, Layout] = dict(lowered.layouts)

    @abstractmethod
    def write(self, node: Node) -> None:
        """Append a node, or what is in its place."""

    def rewritten(self) -> Lowered:
        """The same step by the nodes that are written."""
        graph = self._lowered.graph
        for node in graph.nodes:
            self.write(node)
        tensors = MappingProxyType(self.tensors)
        graph = Graph(tensors, tuple(self.nodes), graph.outputs)
        return replace(
            self._lowered, graph=graph, calls=self.calls, layouts=self.layouts
        )


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
"""Operation -> what it fills a tensor with."""


_UNFILLED = frozenset({"aten.empty_like.default", "aten.new_empty.default"})


def prepared(lowered: Lowered) -> Lowered:
    """The same step, ready to be cut."""
    return _PartsWriter(lowered).rewritten()


class _PartsWriter(Rewriting):
    def write(self, node: Node) -> None:
        """A node, or what is in its place."""
        call = self.calls[node.name]
        if node.op in nll_counted and _mean_of(call) and call.results[:1] == (0,):
            self._loss(node, call)
        elif (node.op in _FILLED or node.op in _UNFILLED) and self._dense(node):
            self.calls[node.name] = self._filled(node, call)
            self.nodes.append(replace(node, inputs=()))
        else:
            self.nodes.append(node)

    def _dense(self, node: Node) -> bool:
        layout = self.layouts[node.outputs[0]]
        plain = torch.empty(layout.shape, device="meta").stride()
        leaves = [*self.calls[node.name].args[1:]]
        return layout.stride == tuple(plain) and not any(map(_is_tensor, leaves))

    def _filled(self, node: Node, call: Call) -> Call:
        layout = self.layouts[node.outputs[0]]
        kind = {"dtype": layout.dtype, "device": layout.device}
        sizes = list(layout.shape)
        if node.op in _UNFILLED:
            function: Any = torch.ops.aten.empty.memory_format
            return Call(function, (sizes,), kind, (None,))
        value = _FILLED[node.op](call.args)
        return Call(torch.ops.aten.full.default, (sizes, value), kind, (None,))

    def _loss(self, node: Node, call: Call) -> None:
        """A mean over the labels that count."""
        scores, labels, weights, _, ignored = (*call.args, -100)[:5]
        loss = node.outputs[0]
        count, total = f"{node.name}:count", f"{node.name}:sum"
        if len(node.outputs) > 1:
            count = node.outputs[1]
        else:
            self._declare(count, loss)
        self._declare(total, loss)
        dtype = self.layouts[loss].dtype
        read = [node.inputs[a.index] for a in (labels, weights) if _is_tensor(a)]
        given = [Operand(0), Operand(1) if _is_tensor(weights) else None]
        counted = Call(_counted, (*given, ignored, dtype), {}, (None,))
        self._add(node, "count", counted, tuple(read), count)
        args = (scores, labels, weights, SUM, ignored)
        self._add(
            node, "sums", replace(call, args=args, results=(0,)), node.inputs, total
        )
        divided = Call(torch.ops.aten.div.Tensor, (Operand(0), Operand(1)), {}, (None,))
        self._add(node, "mean", divided, (total, count), loss)

    def _declare(self, name: str, like: str) -> None:
        layout = self.layouts[like]
        self.tensors[name] = replace(
            self.tensors[like],
            name=name,
            alias=None,
            shape=(layout.dtype.itemsize,),
        )
        self.layouts[name] = replace(layout, offset=0)

    def _add(
        self, node: Node, what: str, call: Call, inputs: tuple[str, ...], output: str
    ) -> None:
        name = f"{node.name}:{what}"
        self.calls[name] = call
        op = node.op if what == "sums" else f"{node.op}:{what}"
        self.nodes.append(
            Node(name, op, inputs, (output,), phase=node.phase, traits=PLAIN)
        )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Operand)


def _mean_of(call: Call) -> bool:
    return call.args[3:4] in ((), (MEAN,)) and not call.kwargs


def _counted(
    labels: torch.Tensor,
    weights: torch.Tensor | None,
    ignored: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """How many labels count, or what they weigh."""
    counts = labels != ignored
    if weights is None:
        return counts.sum().to(dtype)
    known = torch.where(counts, labels, 0)
    return torch.where(counts, weights[known], 0).sum()


# Batch normalisation in parts: what a strip adds to statistics, and what it is given.
#
# Statistics of strips are merged (Chan, Golub and LeVeque, 1979); each strip is then
# normalised by those of all. Gradients of parameters are sums over strips, and a
# strip's own gradient follows from them. Kernels are PyTorch's for given statistics.


SUMS = "batch_norm:sums"

MERGE = "batch_norm:merge"

APPLY = "batch_norm:apply"

GRAD_SUMS = "batch_norm:grad_sums"

GRAD_APPLY = "batch_norm:grad_apply"


def sums(x: torch.Tensor) -> torch.Tensor:
    """Of each channel the mean, the squares beside it, and how many there are."""
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
    """Statistics of all parts together.

    Returns:
        The mean, one over the deviation, the variance, and both running statistics.
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
    """A strip, by the statistics of all."""
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
    """What a strip adds to the gradients of weights and biases."""
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
    """The gradient of a strip, of so many elements of each channel in all."""
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


def _by_rows(*positions: int, **more: Any) -> Rule:
    """Images at some positions, whose channels are not what is cut."""

    def rule(site: Site) -> Cut | None:
        axis = site.axis(positions[0])
        if axis is None or axis.index == 1:
            return None
        summed = more.get("gathered") or len(site.outputs[0].shape) <= axis.index
        outputs = (None if summed else axis,) * len(site.outputs)
        return Cut(site.at(dict.fromkeys(positions, axis)), outputs, **more)

    return rule


NORMS: Mapping[str, Rule] = MappingProxyType(
    {
        SUMS: _by_rows(0, gathered=True),
        APPLY: _by_rows(1),
        GRAD_SUMS: _by_rows(1, 2),
        GRAD_APPLY: _by_rows(1, 2),
    }
)
"""Operation -> how it is cut."""


# Batch normalisations rewritten into parts: all but the statistics are cut.


_WITH_RUNNING = "aten._native_batch_norm_legit_functional.default"

_WITHOUT_RUNNING = "aten._native_batch_norm_legit.no_stats"

_BACKWARD = "aten.native_batch_norm_backward.default"


_KEPT = NodeTraits(recomputable=False)
"""Of statistics: they are not merged twice."""


_TYPES = frozenset({torch.float32, torch.float64})
"""In which parts are computed; what is narrower stays whole."""


def with_norms_in_parts(lowered: Lowered) -> Lowered:
    """The same step with batch norms of images in training as several nodes each."""
    return _NormsWriter(lowered).rewritten()


class _NormsWriter(Rewriting):
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
        self._add(node, SUMS, sums, (), [image], {None: left})
        merged = {0: results[1], 1: results[2], 2: variance}
        merged |= {path: results[path] for path in (3, 4) if path in results}
        options = momentum, eps
        self._add(node, MERGE, merged_parts, options, [*ran, [left]], merged)
        applied = [image, results[1], variance, weights, biases]
        made = {None: results[0]}
        self._add(node, APPLY, normalised, (eps,), applied, made)
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
        self._add(node, GRAD_SUMS, grad_sums, (eps,), read, sums)
        if 0 not in results:
            return True
        count = torch.Size(sizes).numel() // sizes[1]
        read = [gradient, image, mean, inverse, results[1], results[2], weights]
        made = {None: results[0]}
        self._add(node, GRAD_APPLY, grad_applied, (count,), read, made)
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
        traits = _KEPT if op == MERGE else PLAIN
        self.nodes.append(
            Node(name, op, tuple(inputs), outputs, phase=node.phase, traits=traits)
        )


# Gradients without the operands of which they need the sizes alone.
#
# PyTorch gives a gradient of images the images themselves, and reads nothing of them
# but how large they are. A strip of the gradient would have to wait for them.


_IMAGE = 1
"""Where gradients have the images."""


_POOLS = frozenset(
    f"aten.{kind}_backward.default"
    for kind in (
        *("avg_pool2d", "avg_pool3d"),
        *("max_pool2d_with_indices", "max_pool3d_with_indices"),
    )
)

_CONVOLUTION = "aten.convolution_backward.default"

_TRANSPOSED = 7
"""Where the gradient of a convolution has whether it is a transposed one."""


@dataclass(frozen=True, slots=True)
class OfShape:
    """A call of `of_shape`, by its arguments.

    Attributes:
        function: PyTorch's.
        sizes: Of the images.
        args: PyTorch's, without the images.
    """

    function: Any
    sizes: tuple[int, ...]
    args: tuple[Any, ...]

    @classmethod
    def of(cls, call: Call) -> "OfShape | None":
        """What is called; None if it is something else."""
        if call.function is not of_shape:
            return None
        function, sizes, *args = call.args
        return cls(function, tuple(sizes), tuple(args))

    def call(self, whole: Call) -> Call:
        """As a call, like another."""
        args = (self.function, list(self.sizes), *self.args)
        return replace(whole, function=of_shape, args=args, into=None)


def of_shape(
    function: Any, sizes: list[int], gradient: torch.Tensor, *args: Any
) -> Any:
    """A gradient of images of which there are the sizes alone."""
    image = gradient.new_zeros(()).expand(sizes)
    return function(gradient, image, *args)


def without_shape_operands(lowered: Lowered) -> Lowered:
    """The same step, whose gradients of images do not read them.

    A bias's gradient of a transposed convolution is a sum of its own: the rows that a
    strip of the filter's reads overlap.
    """
    return _ShapesWriter(lowered).rewritten()


class _ShapesWriter(Rewriting):
    def write(self, node: Node) -> None:
        """A node, or what is in its place."""
        call = self.calls[node.name]
        of_images = node.op in _POOLS or (
            node.op == _CONVOLUTION and call.results == (0,)
        )
        if of_images and self._shape_alone(node, call):
            self._without_image(node, call)
        elif node.op == _CONVOLUTION and call.results == (1, 2) and self._turned(call):
            self._apart(node, call)
        else:
            self.nodes.append(node)

    def _turned(self, call: Call) -> bool:
        return call.args[_TRANSPOSED] is True

    def _shape_alone(self, node: Node, call: Call) -> bool:
        """Whether the images are dense, and are no other operand too."""
        image = call.args[_IMAGE]
        others = [*call.args[:_IMAGE], *call.args[_IMAGE + 1 :]]
        if not isinstance(image, Operand) or image in others:
            return False
        return _dense(self.layouts[node.inputs[image.index]])

    def _without_image(self, node: Node, call: Call) -> None:
        gone = call.args[_IMAGE].index
        moved = [
            Operand(a.index - (a.index > gone)) if isinstance(a, Operand) else a
            for a in call.args
        ]
        sizes = self.layouts[node.inputs[gone]].shape
        args = (*moved[:_IMAGE], *moved[_IMAGE + 1 :])
        self.calls[node.name] = OfShape(call.function, sizes, args).call(call)
        inputs = (*node.inputs[:gone], *node.inputs[gone + 1 :])
        self.nodes.append(replace(node, inputs=inputs))

    def _apart(self, node: Node, call: Call) -> None:
        """A filter's gradient, and its bias's, of a transposed convolution."""
        filters, bias = node.outputs
        self.calls[node.name] = replace(
            call, args=(*call.args[:-1], [False, True, False]), results=(1,)
        )
        self.nodes.append(replace(node, outputs=(filters,)))
        gradient = node.inputs[call.args[0].index]
        rank = len(self.layouts[gradient].shape)
        axes = [axis for axis in range(rank) if axis != 1]
        name = f"{node.name}:bias"
        summed = torch.ops.aten.sum.dim_IntList
        self.calls[name] = Call(
            summed, (Operand(0), axes), MappingProxyType({}), (None,)
        )
        self.nodes.append(
            Node(name, str(summed), (gradient,), (bias,), phase=node.phase)
        )


def _dense(layout: Layout) -> bool:
    plain = torch.empty(layout.shape, device="meta").stride()
    return layout.stride == tuple(plain)
