"""Layer functions of the graph builder, one function for each kind of layer.

A layer checks the shapes of its inputs, declares its parameters, appends nodes to the
builder and returns the name of its result. Custom layers are written the same way.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from mucudnn.arguments import (
    check_bool,
    check_choice,
    check_integer,
    check_integers,
    check_number,
)
from mucudnn.ir.conv import (
    ConvProblem,
    Direction,
    Ints,
    Window,
    channels as channels_of,
    per_axis,
)
from mucudnn.ir.initializers import Constant, HeNormal, Initializer
from mucudnn.ir.tensor import INTEGERS, ITEMSIZE

if TYPE_CHECKING:
    from mucudnn.ir.builder import GraphBuilder


def bias(g: "GraphBuilder", x: str, initializer: Initializer | None = None) -> str:
    """Add one number per channel (axis 1)."""
    start = Constant(0.0) if initializer is None else initializer
    b = g.parameter("bias", (channels_of(x, g.shape(x)),), start)
    return g.append("bias", (x, b), g.shape(x))


def biased(g: "GraphBuilder", x: str, how: bool | Initializer) -> str:
    """Add a bias if a layer's argument `bias` requests one."""
    if isinstance(how, bool):
        return bias(g, x) if how else x
    return bias(g, x, how)


def linear(
    g: "GraphBuilder",
    x: str,
    features: int,
    *,
    bias: bool | Initializer = True,
    initializer: Initializer | None = None,
    name: str = "linear",
) -> str:
    """Apply a dense layer from (N, F) to (N, features)."""
    shape = g.shape(x)
    if len(shape) != 2:
        raise ValueError(f"linear takes (N, F), got {shape}; flatten it first")
    check_integer("features", features, least=1)
    with g.scope(name):
        start = HeNormal() if initializer is None else initializer
        w = g.parameter("weight", (features, shape[1]), start)
        out = (shape[0], features)
        y = g.append("matmul", (x, w), out, transpose_a=False, transpose_b=True)
        return biased(g, y, bias)


# Convolutions and their adjoints.


def conv(
    g: "GraphBuilder",
    x: str,
    channels: int,
    kernel: Ints,
    *,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    bias: bool | Initializer = True,
    initializer: Initializer | None = None,
    name: str = "conv",
) -> str:
    """Convolve to `channels` channels, in 1, 2 or 3 dimensions.

    `bias` is whether to add a bias, or its initializer.
    """
    shape, depth = g.shape(x), channels_of(x, g.shape(x))
    kernels = per_axis("kernel", kernel, len(shape) - 2, 1)
    problem = ConvProblem(
        direction=Direction.FORWARD,
        x_shape=shape,
        w_shape=(
            check_integer("channels", channels, least=1),
            max(1, depth // check_integer("groups", groups, least=1)),
            *kernels,
        ),
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        dtype=g.spec(x).dtype,
    )
    with g.scope(name):
        return biased(g, _weighted(g, x, problem, initializer), bias)


def conv_transpose(
    g: "GraphBuilder",
    x: str,
    channels: int,
    kernel: Ints,
    *,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    bias: bool | Initializer = True,
    initializer: Initializer | None = None,
    name: str = "conv_transpose",
) -> str:
    """Apply the adjoint of a convolution, which up-samples by `stride`.

    Its weight has shape (C, channels // groups, *kernel), as in PyTorch.
    """
    shape, depth = g.shape(x), channels_of(x, g.shape(x))
    # The adjoint of a convolution: its output is that convolution's input.
    kernels, steps, pads, dilations, extra = (
        per_axis(label, value, len(shape) - 2, least)
        for label, value, least in (
            ("kernel", kernel, 1),
            ("stride", stride, 1),
            ("padding", padding, 0),
            ("dilation", dilation, 1),
            ("output_padding", output_padding, 0),
        )
    )
    spatial = (
        (n - 1) * step - 2 * pad + gap * (k - 1) + 1 + more
        for n, k, step, pad, gap, more in zip(
            shape[2:], kernels, steps, pads, dilations, extra, strict=True
        )
    )
    problem = ConvProblem(
        direction=Direction.BACKWARD_DATA,
        x_shape=(shape[0], check_integer("channels", channels, least=1), *spatial),
        w_shape=(
            depth,
            max(1, channels // check_integer("groups", groups, least=1)),
            *kernels,
        ),
        stride=steps,
        padding=pads,
        dilation=dilations,
        groups=groups,
        dtype=g.spec(x).dtype,
    )
    # Convolving the result must give the shape of the input again.
    if problem.y_shape != shape:
        raise ValueError(f"output_padding {extra} must be below stride {steps}")
    with g.scope(name):
        return biased(g, _weighted(g, x, problem, initializer), bias)


def _weighted(
    g: "GraphBuilder", x: str, problem: ConvProblem, initializer: Initializer | None
) -> str:
    """Append a convolution node with its own weight."""
    out = problem.y_shape if problem.direction is Direction.FORWARD else problem.x_shape
    start = HeNormal() if initializer is None else initializer
    w = g.parameter("weight", problem.w_shape, start)
    return g.append("conv", (x, w), out, problem=problem)


_STEP = "step"
"""Input tensor that counts steps, shared by all dropouts and by Adam."""


def relu(g: "GraphBuilder", x: str) -> str:
    """Compute max(x, 0)."""
    return g.append("relu", (x,), g.shape(x))


def leaky_relu(g: "GraphBuilder", x: str, slope: float = 0.01) -> str:
    """Compute x where positive, else slope * x; the slope must be positive."""
    check_number("slope", slope, 0, above=True)
    return g.append("leaky_relu", (x,), g.shape(x), slope=slope)


def gelu(g: "GraphBuilder", x: str) -> str:
    """Compute x times the normal distribution function of x."""
    return g.append("gelu", (x,), g.shape(x))


def sigmoid(g: "GraphBuilder", x: str) -> str:
    """Compute 1 / (1 + exp(-x))."""
    return g.append("sigmoid", (x,), g.shape(x))


def tanh(g: "GraphBuilder", x: str) -> str:
    """Compute the hyperbolic tangent."""
    return g.append("tanh", (x,), g.shape(x))


def dropout(g: "GraphBuilder", x: str, p: float = 0.5) -> str:
    """Zero each element with probability p and scale the rest by 1 / (1 - p)."""
    if not 0 <= check_number("p", p, finite=False) < 1:
        raise ValueError(f"p must be at least 0 and below 1, got {p}")
    if not g.training or p == 0:
        return x
    # Each dropout has a seed of its own, or equal layers would drop the same elements.
    seed = g.seed + sum(node.op == "dropout" for node in g.nodes)
    if _STEP not in g.tensors:
        g.input(_STEP, (), "int64")
    return g.append("dropout", (x, _STEP), g.shape(x), p=p, seed=seed)


def add(g: "GraphBuilder", a: str, b: str) -> str:
    """Compute a + b for tensors of one shape."""
    return g.append("add", (a, b), common_shape(g, a, b))


def multiply(g: "GraphBuilder", a: str, b: str) -> str:
    """Compute a * b for tensors of one shape."""
    return g.append("multiply", (a, b), common_shape(g, a, b))


def scale(g: "GraphBuilder", x: str, factor: float) -> str:
    """Compute factor * x."""
    check_number("factor", factor)
    return g.append("scale", (x,), g.shape(x), factor=factor)


def cast(g: "GraphBuilder", x: str, dtype: str) -> str:
    """Convert to another data type."""
    check_choice("dtype", dtype, (*ITEMSIZE, *INTEGERS))
    return g.append("cast", (x,), g.shape(x), dtype=dtype)


def common_shape(g: "GraphBuilder", a: str, b: str) -> tuple[int, ...]:
    """Return the shape of two tensors; differing shapes raise a `ValueError`."""
    if g.shape(a) != g.shape(b):
        raise ValueError(f"{a!r} has shape {g.shape(a)}, {b!r} has {g.shape(b)}")
    return g.shape(a)


def softmax_cross_entropy(g: "GraphBuilder", logits: str, labels: str) -> str:
    """Compute the mean of -log softmax(logits)[label] over samples and pixels."""
    _check_labels(g, logits, labels)
    logarithms = ("log_probabilities", g.shape(logits), g.spec(logits).dtype)
    return g.append("softmax_cross_entropy", (logits, labels), (), (logarithms,))


def mean_squared_error(g: "GraphBuilder", prediction: str, target: str) -> str:
    """Compute the mean of the squared differences."""
    common_shape(g, prediction, target)
    return g.append("mean_squared_error", (prediction, target), ())


def accuracy(g: "GraphBuilder", logits: str, labels: str, k: int = 1) -> str:
    """Count the samples (pixels) whose label is among the k largest logits."""
    _check_labels(g, logits, labels)
    check_integer("k", k, least=1)
    return g.append("accuracy", (logits, labels), (), k=k)


def _check_labels(g: "GraphBuilder", logits: str, labels: str) -> None:
    channels_of(logits, g.shape(logits))  # refuses scalars
    n, _, *spatial = g.shape(logits)
    if g.shape(labels) != (n, *spatial) or g.spec(labels).dtype != "int64":
        raise ValueError(
            f"labels must be int64 {(n, *spatial)} for logits {g.shape(logits)}, "
            f"got {g.spec(labels).dtype} {g.shape(labels)}"
        )


# Normalization layers.


def batch_norm(
    g: "GraphBuilder",
    x: str,
    *,
    eps: float = 1e-5,
    momentum: float = 0.1,
    scale: Initializer | None = None,
    name: str = "batch_norm",
) -> str:
    """Normalize each channel over the batch, or by running statistics."""
    shape, channels = g.shape(x), (channels_of(x, g.shape(x)),)
    check_number("eps", eps, 0)
    check_number("momentum", momentum, 0, 1)
    with g.scope(name):
        inputs = (
            x,
            g.parameter("weight", channels, Constant(1.0) if scale is None else scale),
            g.parameter("bias", channels, Constant(0.0)),
            g.state("running_mean", channels, Constant(0.0)),
            g.state("running_var", channels, Constant(1.0)),
        )
        if not g.training:
            return g.append("batch_norm_eval", inputs, shape, eps=eps)
        # Statistics are saved in the parameters' type, which mixed precision keeps
        # wide.
        dtype = g.spec(inputs[1]).dtype
        return g.append(
            "batch_norm",
            inputs,
            shape,
            (("mean", channels, dtype), ("inv_std", channels, dtype)),
            mutates=inputs[3:],
            eps=eps,
            momentum=momentum,
            update=True,
        )


def group_norm(
    g: "GraphBuilder",
    x: str,
    groups: int,
    *,
    eps: float = 1e-5,
    name: str = "group_norm",
) -> str:
    """Normalize each sample over groups of channels; scale each channel."""
    channels = channels_of(x, g.shape(x))
    if channels % check_integer("groups", groups, least=1):
        raise ValueError(f"{channels} channels cannot be divided into {groups} groups")
    with g.scope(name):
        return _append_group_norm(g, x, (channels,), groups, eps, per_element=False)


def layer_norm(
    g: "GraphBuilder", x: str, *, eps: float = 1e-5, name: str = "layer_norm"
) -> str:
    """Normalize each sample over all its elements; scale each element."""
    with g.scope(name):
        return _append_group_norm(g, x, g.shape(x)[1:], 1, eps, per_element=True)


def lrn(
    g: "GraphBuilder",
    x: str,
    size: int = 5,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 1.0,
) -> str:
    """Apply local response normalization across channels (AlexNet, sec. 3.3)."""
    check_integer("size", size, least=1)
    for label, value in (("alpha", alpha), ("beta", beta), ("k", k)):
        check_number(label, value, 0)
    return g.append("lrn", (x,), g.shape(x), size=size, alpha=alpha, beta=beta, k=k)


def _append_group_norm(
    g: "GraphBuilder",
    x: str,
    affine: tuple[int, ...],
    groups: int,
    eps: float,
    *,
    per_element: bool,
) -> str:
    check_number("eps", eps, 0)
    shape = g.shape(x)
    weight = g.parameter("weight", affine, Constant(1.0))
    bias = g.parameter("bias", affine, Constant(0.0))
    saved, dtype = (shape[0], groups), g.spec(weight).dtype
    return g.append(
        "group_norm",
        (x, weight, bias),
        shape,
        (("mean", saved, dtype), ("inv_std", saved, dtype)),
        groups=groups,
        eps=eps,
        per_element=per_element,
    )


_MOST_WINDOW = 255
"""Maximum size of a max-pooling window: the index of the maximum is one byte."""


def max_pool(
    g: "GraphBuilder",
    x: str,
    kernel: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    *,
    ceil_mode: bool = False,
) -> str:
    """Return the maximum of each window; the default stride is the kernel."""
    check_bool("ceil_mode", ceil_mode)
    shape = g.shape(x)
    window = Window.over(shape[2:], kernel, stride, padding, ceil_mode)
    if math.prod(window.kernel) > _MOST_WINDOW:
        raise ValueError(
            f"a max-pooling window of {window.kernel} has more than "
            f"{_MOST_WINDOW} values"
        )
    out = (*shape[:2], *window.out(shape[2:]))
    # The gradient needs one byte per output instead of the whole input.
    return g.append("max_pool", (x,), out, (("index", out, "uint8"),), **asdict(window))


def avg_pool(
    g: "GraphBuilder",
    x: str,
    kernel: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    *,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> str:
    """Average each window; padding counts as zeros unless excluded."""
    check_bool("ceil_mode", ceil_mode)
    check_bool("count_include_pad", count_include_pad)
    shape = g.shape(x)
    window = Window.over(shape[2:], kernel, stride, padding, ceil_mode)
    out = (*shape[:2], *window.out(shape[2:]))
    return g.append(
        "avg_pool", (x,), out, count_include_pad=count_include_pad, **asdict(window)
    )


def global_avg_pool(g: "GraphBuilder", x: str) -> str:
    """Average each channel: (N, C, *spatial) to (N, C, 1, …)."""
    return avg_pool(g, x, g.shape(x)[2:])


def global_max_pool(g: "GraphBuilder", x: str) -> str:
    """Return the maximum of each channel."""
    return max_pool(g, x, g.shape(x)[2:])


def concat(g: "GraphBuilder", tensors: Sequence[str]) -> str:
    """Concatenate tensors along their channels."""
    if isinstance(tensors, str) or not isinstance(tensors, Sequence) or not tensors:
        raise TypeError(f"concat takes a list of names of tensors, got {tensors!r}")
    for name in tensors:
        channels_of(name, g.shape(name))
    shapes = [g.shape(t) for t in tensors]
    for shape in shapes[1:]:
        if (shape[0], *shape[2:]) != (shapes[0][0], *shapes[0][2:]):
            raise ValueError(f"cannot concatenate {shapes} along channels")
    depth = sum(shape[1] for shape in shapes)
    out = (shapes[0][0], depth, *shapes[0][2:])
    return g.append("concat", tuple(tensors), out, axis=1)


def slice(
    g: "GraphBuilder", x: str, starts: Sequence[int], stops: Sequence[int]
) -> str:
    """Return the box from `starts` to `stops` (exclusive), over all axes."""
    shape = g.shape(x)
    starts, stops = check_integers("starts", starts), check_integers("stops", stops)
    if not len(starts) == len(stops) == len(shape) or any(
        not 0 <= a < b <= n for a, b, n in zip(starts, stops, shape, strict=True)
    ):
        raise ValueError(f"no box from {starts} to {stops} in shape {shape}")
    out = tuple(b - a for a, b in zip(starts, stops, strict=True))
    return g.append("slice", (x,), out, starts=tuple(starts), stops=tuple(stops))


def pad(g: "GraphBuilder", x: str, before: Sequence[int], after: Sequence[int]) -> str:
    """Add zeros at both ends of all axes."""
    shape = g.shape(x)
    before, after = check_integers("before", before), check_integers("after", after)
    if not len(before) == len(after) == len(shape) or min(*before, *after, 0) < 0:
        raise ValueError(f"cannot pad {shape} by {before} and {after}")
    out = tuple(a + n + b for a, n, b in zip(before, shape, after, strict=True))
    return g.append("pad", (x,), out, before=tuple(before), after=tuple(after))


def reshape(g: "GraphBuilder", x: str, shape: Sequence[int]) -> str:
    """View the same bytes in another shape."""
    shape = check_integers("shape", shape, least=1)
    if math.prod(shape) != math.prod(g.shape(x)):
        raise ValueError(f"{g.shape(x)} cannot be viewed as {tuple(shape)}")
    return g.append("reshape", (x,), tuple(shape), alias=x)


def flatten(g: "GraphBuilder", x: str) -> str:
    """View (N, …) as (N, F)."""
    shape = g.shape(x)
    return reshape(g, x, (shape[0], math.prod(shape[1:])))


def upsample_nearest(g: "GraphBuilder", x: str, scale: Ints = 2) -> str:
    """Repeat every pixel `scale` times along each axis."""
    return _upsample(g, "upsample_nearest", x, scale)


def upsample_bilinear(g: "GraphBuilder", x: str, scale: Ints = 2) -> str:
    """Interpolate linearly along every axis; corners are not aligned."""
    return _upsample(g, "upsample_bilinear", x, scale)


def _upsample(g: "GraphBuilder", op: str, x: str, scale: Ints) -> str:
    shape = g.shape(x)
    scales = per_axis("scale", scale, len(shape) - 2, 1)
    spatial = (n * s for n, s in zip(shape[2:], scales, strict=True))
    return g.append(op, (x,), (*shape[:2], *spatial), scale=scales)
