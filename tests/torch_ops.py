"""Graphs executed with PyTorch: the oracle for autodiff and for kernels.

`FORWARD` holds PyTorch's own functions, which its autograd differentiates. `GRADIENT`
holds the formulas of what autodiff appends, so that a whole training graph can be run
without any kernel of ours.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.tensor import TensorSpec

Masks = Callable[[Sequence[int], Mapping[str, Any], int], Tensor]
Op = Callable[[Node, Sequence[Tensor], Sequence[TensorSpec]], Any]

CONV = (functional.conv1d, functional.conv2d, functional.conv3d)
CONV_TRANSPOSE = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)
CONV_WEIGHT = (
    torch.nn.grad.conv1d_weight,
    torch.nn.grad.conv2d_weight,
    torch.nn.grad.conv3d_weight,
)
MAX_POOL = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
AVG_POOL = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)
LINEAR_MODE = ("linear", "bilinear", "trilinear")


def bernoulli(shape: Sequence[int], attrs: Mapping[str, Any], step: int) -> Tensor:
    """A mask that follows from seed and step, as ours does, if not the same one."""
    generator = torch.Generator().manual_seed(1009 * attrs["seed"] + step)
    return (torch.rand(*shape, generator=generator) >= attrs["p"]).double()


def execute(
    graph: Graph,
    feeds: Mapping[str, Tensor],
    masks: Masks = bernoulli,
    decided: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Every tensor of a graph; state among the feeds is updated in place.

    Which values a ReLU lets through and which are largest is taken from `decided` where
    it says: rounding may decide it, and then there are two right gradients.
    """
    values = dict(feeds)
    for node in graph.nodes:
        inputs = _of_one_type([values[name] for name in node.inputs])
        specs = [graph.tensors[name] for name in node.outputs]
        if node.op == "dropout":
            x, step = inputs
            mask = masks(x.shape, node.attrs, int(step)).to(x.dtype)
            outputs = x * mask / (1 - node.attrs["p"])
        elif node.op == "relu" and node.outputs[0] in decided:
            outputs = inputs[0] * (decided[node.outputs[0]] > 0)
        elif node.op.endswith("_relu") and node.outputs[0] in decided:
            y, *others = _sum_before_relu(node, inputs)
            outputs = (y * (decided[node.outputs[0]] > 0), *others)
        elif node.op == "max_pool" and node.outputs[1] in decided:
            index = decided[node.outputs[1]].long()
            chosen = _windows(inputs[0], node, -math.inf)
            outputs = chosen.gather(-1, index[..., None])[..., 0], index
        else:
            outputs = OPS[node.op](node, inputs, specs)
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        for spec, value in zip(specs, outputs, strict=True):
            assert tuple(value.shape) == spec.shape, (node, spec, value.shape)
            values[spec.name] = _of_type(value, spec)
    return values


_NARROW = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def _of_one_type(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Narrow tensors beside wider ones are read as those."""
    floats = {x.dtype for x in inputs if x.dtype.is_floating_point}
    wide = floats - {*_NARROW.values()}
    if wide in (floats, set()):
        return list(inputs)
    to = max(wide, key=lambda dtype: dtype.itemsize)
    return [x.to(to) if x.dtype.is_floating_point else x for x in inputs]


def _of_type(value: Tensor, spec: TensorSpec) -> Tensor:
    """Narrow where its tensor is; else as wide as it was computed, or single."""
    if spec.dtype in _NARROW:
        return value.to(_NARROW[spec.dtype])
    return value.float() if value.dtype in _NARROW.values() else value


# -- forward --------------------------------------------------------------------------


def _conv(node: Node, inputs: Sequence[Tensor], specs: Sequence[TensorSpec]) -> Tensor:
    problem: ConvProblem = node.attrs["problem"]
    a, b = inputs
    i = len(problem.stride) - 1
    how = {
        "stride": problem.stride,
        "padding": problem.padding,
        "dilation": problem.dilation,
        "groups": problem.groups,
    }
    match problem.direction:
        case Direction.FORWARD:
            return CONV[i](a, b, **how)
        case Direction.BACKWARD_DATA:
            more = tuple(
                x - ((y - 1) * s - 2 * p + d * (k - 1) + 1)
                for x, y, s, p, d, k in zip(
                    problem.x_shape[2:],
                    problem.y_shape[2:],
                    problem.stride,
                    problem.padding,
                    problem.dilation,
                    problem.w_shape[2:],
                    strict=True,
                )
            )
            return CONV_TRANSPOSE[i](a, b, output_padding=more, **how)
        case Direction.BACKWARD_FILTER:
            return CONV_WEIGHT[i](a, problem.w_shape, b, **how)


def _column(b: Tensor, x: Tensor) -> Tensor:
    return b.reshape(1, -1, *(1,) * (x.dim() - 2))


def _axes(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _matmul(node: Node, inputs: Sequence[Tensor], _: Any) -> Tensor:
    a, b = inputs
    a = a.T if node.attrs["transpose_a"] else a
    b = b.T if node.attrs["transpose_b"] else b
    return a @ b


def _max_pool(node: Node, inputs: Sequence[Tensor], _: Any) -> tuple[Tensor, Tensor]:
    (x,) = inputs
    kernel, stride, padding, extra = _window(node)
    ceil = any(extra)
    y = MAX_POOL[len(kernel) - 1](x, kernel, stride, padding, ceil_mode=ceil)
    index = _windows(x.detach(), node, -math.inf).argmax(-1)  # of the first maximum
    return y, index.to(torch.uint8)


def _windows(x: Tensor, node: Node, filling: float) -> Tensor:
    """(N, C, *out, values of the window) of what `filling` surrounds."""
    kernel, stride, padding, extra = _window(node)
    ends = [(p, p + e) for p, e in zip(padding, extra, strict=True)]
    flat = [size for pair in reversed(ends) for size in pair]
    x = functional.pad(x, flat, value=filling)
    for axis, (k, step) in enumerate(zip(kernel, stride, strict=True)):
        x = x.unfold(2 + axis, k, step)
    return x.flatten(2 + len(kernel))


def _window(node: Node) -> tuple[tuple[int, ...], ...]:
    kernel, stride, padding, extra = (
        node.attrs[key] for key in ("kernel", "stride", "padding", "extra")
    )
    return kernel, stride, padding, extra


def _avg_pool(node: Node, inputs: Sequence[Tensor], _: Any) -> Tensor:
    return _averaged(node, inputs[0])


def _averaged(node: Node, x: Tensor) -> Tensor:
    kernel, stride, padding, extra = _window(node)
    return AVG_POOL[len(kernel) - 1](
        x, kernel, stride, padding, any(extra), node.attrs["count_include_pad"]
    )


def _batch_norm(node: Node, inputs: Sequence[Tensor], _: Any) -> tuple[Tensor, ...]:
    x, gamma, beta, mean, var = inputs
    eps = node.attrs["eps"]
    y = functional.batch_norm(
        x, mean, var, gamma, beta, True, node.attrs["momentum"], eps
    )
    batch_var, batch_mean = torch.var_mean(x, _axes(x), correction=0)
    return y, batch_mean, (batch_var + eps).rsqrt()


def _sum_before_relu(node: Node, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The first result of a fused node before its ReLU, and the others."""
    match node.op:
        case "add_relu":
            return [inputs[0] + inputs[1]]
        case "bias_relu":
            return [inputs[0] + _column(inputs[1], inputs[0])]
    y, *others = _batch_norm(node, inputs[:5], None)
    return [sum(inputs[5:], start=y), *others]


def _then_relu(node: Node, inputs: Sequence[Tensor], _: Any) -> tuple[Tensor, ...]:
    y, *others = _sum_before_relu(node, inputs)
    return functional.relu(y), *others


def _batch_norm_eval(node: Node, inputs: Sequence[Tensor], _: Any) -> Tensor:
    x, gamma, beta, mean, var = inputs
    return functional.batch_norm(
        x, mean, var, gamma, beta, False, 0.0, node.attrs["eps"]
    )


def _group_norm(node: Node, inputs: Sequence[Tensor], _: Any) -> tuple[Tensor, ...]:
    x, gamma, beta = inputs
    groups, eps = node.attrs["groups"], node.attrs["eps"]
    if node.attrs["per_element"]:
        y = functional.layer_norm(x, x.shape[1:], gamma, beta, eps)
    else:
        y = functional.group_norm(x, groups, gamma, beta, eps)
    grouped = x.reshape(x.shape[0], groups, -1)
    var, mean = torch.var_mean(grouped, 2, correction=0)
    return y, mean, (var + eps).rsqrt()


def _lrn(node: Node, inputs: Sequence[Tensor], _: Any) -> Tensor:
    a = node.attrs
    return functional.local_response_norm(
        inputs[0], a["size"], a["alpha"], a["beta"], a["k"]
    )


def _slice(node: Node, inputs: Sequence[Tensor], _: Any) -> Tensor:
    starts, stops = node.attrs["starts"], node.attrs["stops"]
    return inputs[0][tuple(map(slice, starts, stops))]


def _pad(node: Node, inputs: Sequence[Tensor], _: Any) -> Tensor:
    pairs = zip(node.attrs["before"], node.attrs["after"], strict=True)
    return functional.pad(
        inputs[0], [n for pair in reversed(list(pairs)) for n in pair]
    )


def _nearest(node: Node, x: Tensor) -> Tensor:
    return functional.interpolate(x, scale_factor=list(map(float, node.attrs["scale"])))


def _linearly(node: Node, x: Tensor) -> Tensor:
    scale = list(map(float, node.attrs["scale"]))
    mode = LINEAR_MODE[len(scale) - 1]
    return functional.interpolate(x, scale_factor=scale, mode=mode, align_corners=False)


def _cross_entropy(_: Node, inputs: Sequence[Tensor], __: Any) -> tuple[Tensor, ...]:
    logits, labels = inputs
    return functional.cross_entropy(logits, labels), logits.log_softmax(1)


def _accuracy(node: Node, inputs: Sequence[Tensor], _: Any) -> Tensor:
    logits, labels = inputs
    greater = (logits > logits.gather(1, labels.unsqueeze(1))).sum(1)
    return (greater < node.attrs["k"]).sum().to(logits.dtype)


def _cast(_: Node, inputs: Sequence[Tensor], specs: Sequence[TensorSpec]) -> Tensor:
    return inputs[0].to(getattr(torch, specs[0].dtype))


FORWARD: Mapping[str, Op] = {
    "accuracy": _accuracy,
    "add": lambda n, i, s: i[0] + i[1],
    "avg_pool": _avg_pool,
    "add_relu": _then_relu,
    "batch_norm": _batch_norm,
    "batch_norm_add_relu": _then_relu,
    "batch_norm_relu": _then_relu,
    "bias_relu": _then_relu,
    "batch_norm_eval": _batch_norm_eval,
    "bias": lambda n, i, s: i[0] + _column(i[1], i[0]),
    "cast": _cast,
    "to_channels_last": lambda n, i, s: i[0].movedim(1, -1),
    "to_channels_first": lambda n, i, s: i[0].movedim(-1, 1),
    "concat": lambda n, i, s: torch.cat(list(i), n.attrs["axis"]),
    "conv": _conv,
    "gelu": lambda n, i, s: functional.gelu(i[0]),
    "group_norm": _group_norm,
    "leaky_relu": lambda n, i, s: functional.leaky_relu(i[0], n.attrs["slope"]),
    "lrn": _lrn,
    "matmul": _matmul,
    "max_pool": _max_pool,
    "mean_squared_error": lambda n, i, s: functional.mse_loss(i[0], i[1]),
    "multiply": lambda n, i, s: i[0] * i[1],
    "pad": _pad,
    "relu": lambda n, i, s: functional.relu(i[0]),
    "reshape": lambda n, i, s: i[0].reshape(s[0].shape),
    "scale": lambda n, i, s: i[0] * n.attrs["factor"],
    "sigmoid": lambda n, i, s: torch.sigmoid(i[0]),
    "slice": _slice,
    "softmax_cross_entropy": _cross_entropy,
    "tanh": lambda n, i, s: torch.tanh(i[0]),
    "upsample_bilinear": lambda n, i, s: _linearly(n, i[0]),
    "upsample_nearest": lambda n, i, s: _nearest(n, i[0]),
}


# -- what autodiff appends ------------------------------------------------------------


def _max_pool_grad(
    node: Node, inputs: Sequence[Tensor], specs: Sequence[TensorSpec]
) -> Tensor:
    dy, index = inputs
    shape = specs[0].shape
    kernel, stride, padding, extra = _window(node)
    room = (n + 2 * p + e for n, p, e in zip(shape[2:], padding, extra, strict=True))
    dx = dy.new_zeros(*shape[:2], *room)
    for position, taps in enumerate(itertools.product(*map(range, kernel))):
        box = tuple(
            slice(tap, tap + (n - 1) * step + 1, step)
            for tap, n, step in zip(taps, dy.shape[2:], stride, strict=True)
        )
        dx[(slice(None), slice(None), *box)] += dy * (index == position)
    inner = (slice(p, p + n) for p, n in zip(padding, shape[2:], strict=True))
    return dx[(slice(None), slice(None), *inner)]


def _adjoint(function: Callable[[Node, Tensor], Tensor]) -> Op:
    """The transpose of a linear function, by PyTorch's autograd."""

    def op(node: Node, inputs: Sequence[Tensor], specs: Sequence[TensorSpec]) -> Tensor:
        (dy,) = inputs
        with torch.enable_grad():
            x = dy.new_zeros(specs[0].shape).requires_grad_()
            (dx,) = torch.autograd.grad(function(node, x), x, dy)
        return dx

    return op


def _batch_norm_grad(
    node: Node, inputs: Sequence[Tensor], _: Any
) -> tuple[Tensor, ...]:
    x, dy, gamma, mean, inv_std = inputs
    count = x.numel() / x.shape[1]
    normed = (x - _column(mean, x)) * _column(inv_std, x)
    dbeta, dgamma = dy.sum(_axes(x)), (dy * normed).sum(_axes(x))
    rest = (_column(dbeta, x) + normed * _column(dgamma, x)) / count
    return _column(gamma * inv_std, x) * (dy - rest), dgamma, dbeta


def _batch_norm_relu_grad(
    node: Node, inputs: Sequence[Tensor], _: Any
) -> tuple[Tensor, ...]:
    x, dy, gamma, beta, mean, inv_std = inputs
    y = (x - _column(mean, x)) * _column(gamma * inv_std, x) + _column(beta, x)
    return _batch_norm_grad(node, (x, dy * (y > 0), gamma, mean, inv_std), None)


def _batch_norm_add_relu_grad(
    node: Node, inputs: Sequence[Tensor], _: Any
) -> tuple[Tensor, ...]:
    x, dy, y, *parameters = inputs
    masked = dy * (y > 0)
    return masked, *_batch_norm_grad(node, (x, masked, *parameters), None)


def _bias_relu_grad(node: Node, inputs: Sequence[Tensor], _: Any) -> tuple[Tensor, ...]:
    y, dy = inputs
    masked = dy * (y > 0)
    return masked, masked.sum(_axes(masked))


def _group_norm_grad(
    node: Node, inputs: Sequence[Tensor], _: Any
) -> tuple[Tensor, ...]:
    x, dy, gamma, mean, inv_std = inputs
    n, groups = mean.shape
    element = node.attrs["per_element"]
    axes = [0] if element else _axes(x)
    normed = (x.reshape(n, groups, -1) - mean[..., None]) * inv_std[..., None]
    dgamma = (dy * normed.reshape(x.shape)).sum(axes)
    weighted = dy * (gamma if element else _column(gamma, x))
    weighted = weighted.reshape(n, groups, -1)
    along = (weighted * normed).mean(2, keepdim=True)
    dx = inv_std[..., None] * (
        weighted - weighted.mean(2, keepdim=True) - normed * along
    )
    return dx.reshape(x.shape), dgamma, dy.sum(axes)


def _lrn_grad(node: Node, inputs: Sequence[Tensor], _: Any) -> Tensor:
    """Each channel's own share, less what it takes from those it is a neighbour of."""
    x, y, dy = inputs
    size, alpha, beta, k = (node.attrs[key] for key in ("size", "alpha", "beta", "k"))
    before, after = size // 2, (size - 1) // 2

    def neighbours(t: Tensor, before: int, after: int) -> Tensor:
        widths = [0, 0] * (t.dim() - 2) + [before, after]
        return functional.pad(t, widths).unfold(1, before + after + 1, 1).sum(-1)

    s = k + alpha / size * neighbours(x * x, before, after)
    taken = neighbours(dy * y / s, after, before)
    return dy * s**-beta - 2 * alpha * beta / size * x * taken


def _gelu_grad(_: Node, inputs: Sequence[Tensor], __: Any) -> Tensor:
    x, dy = inputs
    below = (1 + torch.erf(x / math.sqrt(2))) / 2
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return dy * (below + x * density)


def _cross_entropy_grad(_: Node, inputs: Sequence[Tensor], __: Any) -> Tensor:
    logarithms, labels, dloss = inputs
    target = torch.zeros_like(logarithms).scatter_(1, labels.unsqueeze(1), 1.0)
    return (logarithms.exp() - target) * dloss / labels.numel()


def _leaky_grad(node: Node, inputs: Sequence[Tensor], _: Any) -> Tensor:
    y, dy = inputs
    return torch.where(y > 0, dy, dy * node.attrs["slope"])


def _fill(node: Node, _: Any, specs: Sequence[TensorSpec]) -> Tensor:
    dtype = getattr(torch, specs[0].dtype)
    return torch.full(specs[0].shape, node.attrs["value"], dtype=dtype)


GRADIENT: Mapping[str, Op] = {
    "avg_pool_grad": _adjoint(_averaged),
    "batch_norm_add_relu_grad": _batch_norm_add_relu_grad,
    "batch_norm_grad": _batch_norm_grad,
    "batch_norm_relu_grad": _batch_norm_relu_grad,
    "bias_relu_grad": _bias_relu_grad,
    "bias_grad": lambda n, i, s: i[0].sum(_axes(i[0])),
    "fill": _fill,
    "gelu_grad": _gelu_grad,
    "group_norm_grad": _group_norm_grad,
    "leaky_relu_grad": _leaky_grad,
    "lrn_grad": _lrn_grad,
    "max_pool_grad": _max_pool_grad,
    "mean_squared_error_grad": lambda n, i, s: 2 * (i[0] - i[1]) * i[2] / i[0].numel(),
    "relu_grad": lambda n, i, s: i[1] * (i[0] > 0),
    "sigmoid_grad": lambda n, i, s: i[1] * i[0] * (1 - i[0]),
    "softmax_cross_entropy_grad": _cross_entropy_grad,
    "tanh_grad": lambda n, i, s: i[1] * (1 - i[0] ** 2),
    "upsample_bilinear_grad": _adjoint(_linearly),
    "upsample_nearest_grad": _adjoint(_nearest),
}

OPS: Mapping[str, Op] = {**FORWARD, **GRADIENT}
