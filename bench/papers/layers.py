"""Networks at the level the memory papers speak of: layers, tensors, dependencies.

A tensor has one producer and one consumer: where a paper's network branches there is a
FORK layer, and each of its outputs is a tensor of its own. Shapes are of one image;
what a batch needs is that many times as much, in every account kept here.
"""

import enum
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

FLOAT = 4
"""Bytes of a value: both papers train in single precision."""

Shape = tuple[int, ...]
"""Channels, height, width; three sides of a volume, or none behind a classifier."""


class Kind(enum.Enum):
    """What a layer does, as far as its memory goes."""

    CONV = "conv"
    FC = "fc"
    POOL = "pool"
    ACT = "act"
    BN = "bn"
    LRN = "lrn"
    DROPOUT = "dropout"
    SOFTMAX = "softmax"
    FORK = "fork"
    JOIN = "join"
    CONCAT = "concat"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer.

    Attributes:
        name: Unique in its network.
        kind: What it does.
        inputs: The tensors it consumes; `Network.data` is the batch itself.
        outputs: The tensors it produces: one, or one a branch for a FORK.
        shape: Of each output, of one image.
        weights: Parameters without biases and without those of batch norm.
        biases: Convolutions' and classifiers' biases.
    """

    name: str
    kind: Kind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shape: Shape
    weights: int = 0
    biases: int = 0

    @property
    def numel(self) -> int:
        """Values in one output, of one image."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Network:
    """Layers in an order in which they can run, and the batch they start from.

    Attributes:
        name: As printed.
        data: Shape of one image.
        layers: Each after the producers of its inputs.
    """

    name: str
    data: Shape
    layers: tuple[Layer, ...]

    @cached_property
    def producer(self) -> dict[str, Layer]:
        """Tensor -> the layer that makes it; the batch has none."""
        return {t: layer for layer in self.layers for t in layer.outputs}

    @cached_property
    def consumer(self) -> dict[str, Layer]:
        """Tensor -> the layer that reads it; the last layer's output has none."""
        return {t: layer for layer in self.layers for t in layer.inputs}

    @property
    def parameters(self) -> int:
        """Weights and biases of convolutions and classifiers."""
        return sum(layer.weights + layer.biases for layer in self.layers)

    def numel(self, tensor: str) -> int:
        """Values in a tensor, of one image."""
        layer = self.producer.get(tensor)
        return math.prod(self.data) if layer is None else layer.numel


class LayerBuilder:
    """A network under construction; every method returns the tensors it made.

    Args:
        data: Shape of one image.
        bias: Whether convolutions have one.
    """

    DATA = "data"

    def __init__(self, data: Shape, *, bias: bool = True) -> None:
        self._data = data
        self._bias = bias
        self._layers: list[Layer] = []
        self._counts: Counter[Kind] = Counter()
        self._shapes: dict[str, Shape] = {self.DATA: data}

    def build(self, name: str) -> Network:
        """The network so far."""
        return Network(name, self._data, tuple(self._layers))

    def conv(
        self, x: str, K: int, kernel: int | tuple[int, int], stride: int = 1,
        pad: int | tuple[int, int] = 0,
    ) -> str:  # fmt: skip
        """A convolution with K filters."""
        C, H, W = self._shapes[x]
        r, s = (kernel, kernel) if isinstance(kernel, int) else kernel
        v, h = (pad, pad) if isinstance(pad, int) else pad
        shape = K, _windows(H, r, stride, v), _windows(W, s, stride, h)
        biases = K if self._bias else 0
        return self._one(Kind.CONV, [x], shape, K * C * r * s, biases)

    def pool(
        self, x: str, size: int, stride: int, pad: int = 0, *, ceil: bool = False
    ) -> str:
        """Maximum or mean: the accounts do not differ."""
        C, H, W = self._shapes[x]
        extra = stride - 1 if ceil else 0
        p, q = (_windows(n, size, stride, pad, extra) for n in (H, W))
        return self._one(Kind.POOL, [x], (C, p, q))

    def fc(self, x: str, K: int) -> str:
        """A fully connected layer with K outputs."""
        weights = K * math.prod(self._shapes[x])
        return self._one(Kind.FC, [x], (K, 1, 1), weights, K)

    def act(self, x: str) -> str:
        """Rectification."""
        return self._one(Kind.ACT, [x], self._shapes[x])

    def bn(self, x: str) -> str:
        """Batch norm."""
        return self._one(Kind.BN, [x], self._shapes[x])

    def lrn(self, x: str) -> str:
        """Local response normalization."""
        return self._one(Kind.LRN, [x], self._shapes[x])

    def dropout(self, x: str) -> str:
        """Dropout."""
        return self._one(Kind.DROPOUT, [x], self._shapes[x])

    def softmax(self, x: str) -> str:
        """Softmax with its loss."""
        return self._one(Kind.SOFTMAX, [x], self._shapes[x])

    def conv_act(
        self, x: str, K: int, kernel: int | tuple[int, int], stride: int = 1,
        pad: int | tuple[int, int] = 0,
    ) -> str:  # fmt: skip
        """A convolution and its rectification."""
        return self.act(self.conv(x, K, kernel, stride, pad))

    def fork(self, x: str, branches: int) -> tuple[str, ...]:
        """A copy of x for every branch; branch 0 is walked last."""
        return self._add(Kind.FORK, [x], self._shapes[x], outputs=branches)

    def join(self, xs: Sequence[str]) -> str:
        """The sum."""
        return self._one(Kind.JOIN, xs, self._shapes[xs[0]])

    def concat(self, xs: Sequence[str]) -> str:
        """Along the channels."""
        C = sum(self._shapes[x][0] for x in xs)
        return self._one(Kind.CONCAT, xs, (C, *self._shapes[xs[0]][1:]))

    def _one(
        self, kind: Kind, xs: Sequence[str], shape: Shape, weights: int = 0,
        biases: int = 0,
    ) -> str:  # fmt: skip
        return self._add(kind, xs, shape, weights, biases)[0]

    def _add(
        self, kind: Kind, xs: Sequence[str], shape: Shape, weights: int = 0,
        biases: int = 0, outputs: int = 1,
    ) -> tuple[str, ...]:  # fmt: skip
        if min(shape) < 1:
            raise ValueError(f"a {kind.value} of {self._shapes[xs[0]]} leaves {shape}")
        self._counts[kind] += 1
        name = f"{kind.value}{self._counts[kind]}"
        made = (name,) if outputs == 1 else tuple(f"{name}.{i}" for i in range(outputs))
        layer = Layer(name, kind, tuple(xs), made, shape, weights, biases)
        self._layers.append(layer)
        self._shapes.update(dict.fromkeys(made, shape))
        return made


def _windows(size: int, window: int, stride: int, pad: int, extra: int = 0) -> int:
    return (size + 2 * pad - window + extra) // stride + 1
