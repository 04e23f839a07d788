"""Build forward graphs, one call a layer.

Every method appends nodes and returns the name of its result. Names are made from the
operation and a counter, or under the `scope` in force; a layer declares its own
parameters. A fork is the use of one name twice: nothing is copied.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.initializers import (
    Constant,
    HeNormal,
    Initializer,
)
from mucudnn.ir.shapes import Ints, Window, per_axis
from mucudnn.ir.tensor import Role, TensorSpec

__all__ = ["GraphBuilder"]

_MOST_WINDOW = 255


class GraphBuilder:
    """A forward graph under construction.

    Args:
        dtype: Data type of activations and parameters.
        training: Whether batch norm uses the batch's statistics and dropout drops.
        seed: Of dropout's masks; each layer's own follows from it.

    Attributes:
        initializers: Parameter or state -> how it starts.
    """

    def __init__(
        self, *, dtype: str = "float32", training: bool = True, seed: int = 0
    ) -> None:
        self.dtype = dtype
        self.training = training
        self.initializers: dict[str, Initializer] = {}
        self._seed = seed
        self._tensors: dict[str, TensorSpec] = {}
        self._nodes: list[Node] = []
        self._scopes: list[str] = []
        self._counts: dict[str, int] = {}

    # -- names and declarations ---------------------------------------------------

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Within it, names begin with `name/`."""
        self._scopes.append(self._unique(name))
        try:
            yield
        finally:
            self._scopes.pop()

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Shape of a tensor.

        Raises:
            ValueError: There is none of that name.
        """
        return self._spec(tensor).shape

    def input(self, name: str, shape: Sequence[int], dtype: str | None = None) -> str:
        """Declare a tensor that every step is fed."""
        spec = TensorSpec(name, tuple(shape), dtype or self.dtype, Role.INPUT)
        return self._declare(spec)

    def parameter(
        self, name: str, shape: Sequence[int], initializer: Initializer
    ) -> str:
        """Declare a trainable tensor."""
        return self._persistent(name, shape, initializer, Role.PARAMETER)

    def state(self, name: str, shape: Sequence[int], initializer: Initializer) -> str:
        """Declare a tensor that steps change but no gradient reaches."""
        return self._persistent(name, shape, initializer, Role.STATE)

    def build(self, *outputs: str) -> Graph:
        """Freeze; the first output of a network for training is its loss."""
        return Graph(
            MappingProxyType(dict(self._tensors)),
            tuple(self._nodes),
            outputs,
            initializers=MappingProxyType(dict(self.initializers)),
        )

    # -- convolutions and products ------------------------------------------------

    def conv(
        self,
        x: str,
        channels: int,
        kernel: Ints,
        *,
        stride: Ints = 1,
        padding: Ints = 0,
        dilation: Ints = 1,
        groups: int = 1,
        bias: bool | Initializer = True,
        initializer: Initializer | None = None,
        name: str = "conv",
    ) -> str:
        """A convolution to `channels` channels, in 1, 2 or 3 dimensions.

        `bias` says whether there is one, or how it starts.
        """
        shape = self.shape(x)
        kernels = per_axis("kernel", kernel, len(shape) - 2, 1)
        with self.scope(name):
            w_shape = (channels, shape[1] // groups, *kernels)
            w = self.parameter("weight", w_shape, initializer or HeNormal())
            problem = ConvProblem(
                direction=Direction.FORWARD,
                x_shape=shape,
                w_shape=w_shape,
                stride=stride,
                padding=padding,
                dilation=dilation,
                groups=groups,
                dtype=self._spec(x).dtype,
            )
            y = self._node("conv", (x, w), problem.y_shape, problem=problem)
            return self._biased(y, bias)

    def conv_transpose(
        self,
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
        """The adjoint of a convolution: up-samples by `stride`.

        Its weight has shape (C, channels // groups, *kernel), as in PyTorch.
        """
        shape = self.shape(x)
        rank = len(shape) - 2
        kernels = per_axis("kernel", kernel, rank, 1)
        steps, pads, dils, extra = (
            per_axis(label, value, rank, least)
            for label, value, least in (
                ("stride", stride, 1),
                ("padding", padding, 0),
                ("dilation", dilation, 1),
                ("output_padding", output_padding, 0),
            )
        )
        spatial = tuple(
            (size - 1) * step - 2 * pad + dil * (k - 1) + 1 + more
            for size, step, pad, dil, k, more in zip(
                shape[2:], steps, pads, dils, kernels, extra, strict=True
            )
        )
        with self.scope(name):
            w_shape = (shape[1], channels // groups, *kernels)
            w = self.parameter("weight", w_shape, initializer or HeNormal())
            problem = ConvProblem(
                direction=Direction.BACKWARD_DATA,
                x_shape=(shape[0], channels, *spatial),
                w_shape=w_shape,
                stride=steps,
                padding=pads,
                dilation=dils,
                groups=groups,
                dtype=self._spec(x).dtype,
            )
            if problem.y_shape != shape:
                raise ValueError(f"output_padding {extra} must be below stride {steps}")
            y = self._node("conv", (x, w), problem.x_shape, problem=problem)
            return self._biased(y, bias)

    def bias(self, x: str, initializer: Initializer | None = None) -> str:
        """Add one number a channel (axis 1)."""
        channels = self.shape(x)[1]
        b = self.parameter("bias", (channels,), initializer or Constant(0.0))
        return self._node("bias", (x, b), self.shape(x))

    def linear(
        self,
        x: str,
        features: int,
        *,
        bias: bool | Initializer = True,
        initializer: Initializer | None = None,
        name: str = "linear",
    ) -> str:
        """A dense layer from (N, F) to (N, features)."""
        shape = self.shape(x)
        if len(shape) != 2:
            raise ValueError(f"linear takes (N, F), got {shape}; flatten it first")
        with self.scope(name):
            w = self.parameter(
                "weight", (features, shape[1]), initializer or HeNormal()
            )
            y = self._node(
                "matmul",
                (x, w),
                (shape[0], features),
                transpose_a=False,
                transpose_b=True,
            )
            return self._biased(y, bias)

    # -- pooling ------------------------------------------------------------------

    def max_pool(
        self,
        x: str,
        kernel: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        *,
        ceil_mode: bool = False,
    ) -> str:
        """The largest value of each window; by default it steps by the kernel."""
        shape = self.shape(x)
        window = Window.over(shape[2:], kernel, stride, padding, ceil_mode)
        if math.prod(window.kernel) > _MOST_WINDOW:
            raise ValueError(
                f"a max-pooling window of {window.kernel} has more than "
                f"{_MOST_WINDOW} values"
            )
        out = (*shape[:2], *window.out(shape[2:]))
        return self._node(
            "max_pool", (x,), out, (("index", out, "uint8"),), **_of(window)
        )

    def avg_pool(
        self,
        x: str,
        kernel: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        *,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> str:
        """The mean of each window; padding counts as zeros or not at all."""
        shape = self.shape(x)
        window = Window.over(shape[2:], kernel, stride, padding, ceil_mode)
        out = (*shape[:2], *window.out(shape[2:]))
        return self._node(
            "avg_pool", (x,), out, count_include_pad=count_include_pad, **_of(window)
        )

    def global_avg_pool(self, x: str) -> str:
        """The mean of each channel: (N, C, *spatial) to (N, C, 1, …)."""
        return self.avg_pool(x, self.shape(x)[2:])

    def global_max_pool(self, x: str) -> str:
        """The largest value of each channel."""
        return self.max_pool(x, self.shape(x)[2:])

    # -- normalisation ------------------------------------------------------------

    def batch_norm(
        self,
        x: str,
        *,
        eps: float = 1e-5,
        momentum: float = 0.1,
        scale: Initializer | None = None,
        name: str = "batch_norm",
    ) -> str:
        """Normalise each channel over the batch, or by running statistics."""
        shape, channels = self.shape(x), (self.shape(x)[1],)
        with self.scope(name):
            inputs = (
                x,
                self.parameter("weight", channels, scale or Constant(1.0)),
                self.parameter("bias", channels, Constant(0.0)),
                self.state("running_mean", channels, Constant(0.0)),
                self.state("running_var", channels, Constant(1.0)),
            )
            if not self.training:
                return self._node("batch_norm_eval", inputs, shape, eps=eps)
            dtype = self._spec(x).dtype
            return self._node(
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
        self, x: str, groups: int, *, eps: float = 1e-5, name: str = "group_norm"
    ) -> str:
        """Normalise each sample over groups of channels; scale each channel."""
        shape = self.shape(x)
        if shape[1] % groups:
            raise ValueError(f"{shape[1]} channels do not divide into {groups} groups")
        with self.scope(name):
            return self._normed(x, (shape[1],), groups, eps, per_element=False)

    def layer_norm(self, x: str, *, eps: float = 1e-5, name: str = "layer_norm") -> str:
        """Normalise each sample over everything; scale each element."""
        with self.scope(name):
            return self._normed(x, self.shape(x)[1:], 1, eps, per_element=True)

    def _normed(
        self,
        x: str,
        affine: tuple[int, ...],
        groups: int,
        eps: float,
        *,
        per_element: bool,
    ) -> str:
        shape, dtype = self.shape(x), self._spec(x).dtype
        weight = self.parameter("weight", affine, Constant(1.0))
        bias = self.parameter("bias", affine, Constant(0.0))
        saved = (shape[0], groups)
        return self._node(
            "group_norm",
            (x, weight, bias),
            shape,
            (("mean", saved, dtype), ("inv_std", saved, dtype)),
            groups=groups,
            eps=eps,
            per_element=per_element,
        )

    def lrn(
        self,
        x: str,
        size: int = 5,
        alpha: float = 1e-4,
        beta: float = 0.75,
        k: float = 1.0,
    ) -> str:
        """Local response normalisation across `size` channels (AlexNet, sec. 3.3)."""
        shape = self.shape(x)
        return self._node("lrn", (x,), shape, size=size, alpha=alpha, beta=beta, k=k)

    # -- element by element -------------------------------------------------------

    def relu(self, x: str) -> str:
        """max(x, 0)."""
        return self._node("relu", (x,), self.shape(x))

    def leaky_relu(self, x: str, slope: float = 0.01) -> str:
        """X where it is positive, else slope * x; the slope must be positive."""
        if slope <= 0:
            raise ValueError(f"the slope must be positive, got {slope}")
        return self._node("leaky_relu", (x,), self.shape(x), slope=slope)

    def gelu(self, x: str) -> str:
        """X times the normal distribution function of x."""
        return self._node("gelu", (x,), self.shape(x))

    def sigmoid(self, x: str) -> str:
        """1 / (1 + exp(-x))."""
        return self._node("sigmoid", (x,), self.shape(x))

    def tanh(self, x: str) -> str:
        """Hyperbolic tangent."""
        return self._node("tanh", (x,), self.shape(x))

    def dropout(self, x: str, p: float = 0.5) -> str:
        """Zero each element with probability p and scale the rest by 1 / (1 - p).

        Which ones follows from the builder's seed, the layer and the step, so that a
        mask can be drawn again.
        """
        if not 0 <= p < 1:
            raise ValueError(f"p must be at least 0 and below 1, got {p}")
        if not self.training or p == 0:
            return x
        seed = self._seed + sum(node.op == "dropout" for node in self._nodes)
        step = self._shared("step", (), "int64")
        return self._node("dropout", (x, step), self.shape(x), p=p, seed=seed)

    def add(self, a: str, b: str) -> str:
        """A + b, of one shape."""
        return self._node("add", (a, b), self._common(a, b))

    def multiply(self, a: str, b: str) -> str:
        """A * b, of one shape."""
        return self._node("multiply", (a, b), self._common(a, b))

    def scale(self, x: str, factor: float) -> str:
        """Factor * x."""
        return self._node("scale", (x,), self.shape(x), factor=factor)

    def cast(self, x: str, dtype: str) -> str:
        """The same numbers in another data type."""
        return self._node("cast", (x,), self.shape(x), dtype=dtype)

    # -- shapes -------------------------------------------------------------------

    def concat(self, tensors: Sequence[str]) -> str:
        """Put channels side by side."""
        shapes = [self.shape(t) for t in tensors]
        for shape in shapes[1:]:
            if (shape[0], *shape[2:]) != (shapes[0][0], *shapes[0][2:]):
                raise ValueError(f"cannot concatenate {shapes} along channels")
        channels = sum(shape[1] for shape in shapes)
        out = (shapes[0][0], channels, *shapes[0][2:])
        return self._node("concat", tuple(tensors), out, axis=1)

    def slice(self, x: str, starts: Sequence[int], stops: Sequence[int]) -> str:
        """The box from `starts` up to `stops`, over all axes."""
        shape = self.shape(x)
        if not len(starts) == len(stops) == len(shape) or any(
            not 0 <= a < b <= n for a, b, n in zip(starts, stops, shape, strict=True)
        ):
            raise ValueError(f"no box from {starts} to {stops} in shape {shape}")
        out = tuple(b - a for a, b in zip(starts, stops, strict=True))
        return self._node("slice", (x,), out, starts=tuple(starts), stops=tuple(stops))

    def pad(self, x: str, before: Sequence[int], after: Sequence[int]) -> str:
        """Zeros around, over all axes."""
        shape = self.shape(x)
        if not len(before) == len(after) == len(shape) or min(*before, *after) < 0:
            raise ValueError(f"cannot pad {shape} by {before} and {after}")
        out = tuple(a + n + b for a, n, b in zip(before, shape, after, strict=True))
        return self._node("pad", (x,), out, before=tuple(before), after=tuple(after))

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        """The same bytes under another shape."""
        if math.prod(shape) != math.prod(self.shape(x)):
            raise ValueError(f"{self.shape(x)} cannot be seen as {tuple(shape)}")
        return self._node("reshape", (x,), tuple(shape), alias=x)

    def flatten(self, x: str) -> str:
        """(N, …) as (N, F)."""
        shape = self.shape(x)
        return self.reshape(x, (shape[0], math.prod(shape[1:])))

    def upsample_nearest(self, x: str, scale: Ints = 2) -> str:
        """Repeat every pixel."""
        return self._upsampled("upsample_nearest", x, scale)

    def upsample_bilinear(self, x: str, scale: Ints = 2) -> str:
        """Interpolate linearly along every axis; corners are not aligned."""
        return self._upsampled("upsample_bilinear", x, scale)

    def _upsampled(self, op: str, x: str, scale: Ints) -> str:
        shape = self.shape(x)
        scales = per_axis("scale", scale, len(shape) - 2, 1)
        spatial = (n * s for n, s in zip(shape[2:], scales, strict=True))
        return self._node(op, (x,), (*shape[:2], *spatial), scale=scales)

    # -- losses and metrics -------------------------------------------------------

    def softmax_cross_entropy(self, logits: str, labels: str) -> str:
        """Mean over samples (and pixels) of -log softmax(logits)[label]; a scalar."""
        shape, dtype = self.shape(logits), self._spec(logits).dtype
        self._check_labels(logits, labels)
        return self._node(
            "softmax_cross_entropy",
            (logits, labels),
            (),
            (("probabilities", shape, dtype),),
        )

    def mean_squared_error(self, prediction: str, target: str) -> str:
        """Mean of the squared differences; a scalar."""
        self._common(prediction, target)
        return self._node("mean_squared_error", (prediction, target), ())

    def accuracy(self, logits: str, labels: str, k: int = 1) -> str:
        """How many samples (pixels) have their label among the k best; a scalar."""
        self._check_labels(logits, labels)
        return self._node("accuracy", (logits, labels), (), k=k)

    # -- inside -------------------------------------------------------------------

    def _biased(self, x: str, bias: bool | Initializer) -> str:
        if isinstance(bias, bool):
            return self.bias(x) if bias else x
        return self.bias(x, bias)

    def _check_labels(self, logits: str, labels: str) -> None:
        n, _, *spatial = self.shape(logits)
        if self.shape(labels) != (n, *spatial) or self._spec(labels).dtype != "int64":
            raise ValueError(
                f"labels must be int64 {(n, *spatial)} for logits "
                f"{self.shape(logits)}, got {self._spec(labels).dtype} "
                f"{self.shape(labels)}"
            )

    def _common(self, a: str, b: str) -> tuple[int, ...]:
        if self.shape(a) != self.shape(b):
            raise ValueError(
                f"{a!r} has shape {self.shape(a)}, {b!r} has {self.shape(b)}"
            )
        return self.shape(a)

    def _node(
        self,
        op: str,
        inputs: tuple[str, ...],
        shape: tuple[int, ...],
        saved: tuple[tuple[str, tuple[int, ...], str], ...] = (),
        *,
        alias: str | None = None,
        mutates: tuple[str, ...] = (),
        **attrs: Any,
    ) -> str:
        """Append a node; its first output is the result, `saved` ones are for later."""
        name = self._unique(op)
        dtype = attrs.pop("dtype", None) or self._spec(inputs[0]).dtype
        outputs = [self._declare(TensorSpec(name, shape, dtype, alias=alias))]
        for label, sizes, kind in saved:
            outputs.append(self._declare(TensorSpec(f"{name}:{label}", sizes, kind)))
        self._nodes.append(
            Node(
                name,
                op,
                inputs,
                tuple(outputs),
                MappingProxyType(attrs),
                mutates=mutates,
            )
        )
        return name

    def _persistent(
        self, name: str, shape: Sequence[int], initializer: Initializer, role: Role
    ) -> str:
        full = self._unique(name)
        self.initializers[full] = initializer
        return self._declare(TensorSpec(full, tuple(shape), self.dtype, role))

    def _shared(self, name: str, shape: tuple[int, ...], dtype: str) -> str:
        if name not in self._tensors:
            self.input(name, shape, dtype)
        return name

    def _unique(self, name: str) -> str:
        full = "/".join([*self._scopes[-1:], name])
        count = self._counts.get(full, 0)
        self._counts[full] = count + 1
        return full if count == 0 else f"{full}.{count}"

    def _declare(self, spec: TensorSpec) -> str:
        if spec.name in self._tensors:
            raise ValueError(f"tensor {spec.name!r} is already declared")
        self._tensors[spec.name] = spec
        return spec.name

    def _spec(self, tensor: str) -> TensorSpec:
        try:
            return self._tensors[tensor]
        except KeyError:
            raise ValueError(f"there is no tensor {tensor!r}") from None


def _of(window: Window) -> dict[str, Any]:
    return {
        "kernel": window.kernel,
        "stride": window.stride,
        "padding": window.padding,
        "extra": window.extra,
    }
