"""Densely connected networks.

Source: G. Huang et al., "Densely Connected Convolutional Networks", 2017: sections 3
and 4.2 and table 1.
"""

from functools import partial

from mucudnn.ir.builder import GraphBuilder
from mucudnn.models.model import Model


def _bn_relu_conv(
    g: GraphBuilder, x: str, channels: int, kernel: int, dropout: float
) -> str:
    x = g.relu(g.batch_norm(x))
    x = g.conv(x, channels, kernel, padding=kernel // 2, bias=False)
    return g.dropout(x, dropout)


def _dense_block(
    g: GraphBuilder, x: str, layers: int, growth: int, bottleneck: bool, dropout: float
) -> str:
    for i in range(layers):
        with g.scope(f"layer{i + 1}"):
            y = _bn_relu_conv(g, x, 4 * growth, 1, dropout) if bottleneck else x
            x = g.concat((x, _bn_relu_conv(g, y, growth, 3, dropout)))
    return x


def _transition(g: GraphBuilder, x: str, compression: float, dropout: float) -> str:
    channels = int(g.shape(x)[1] * compression)
    return g.avg_pool(_bn_relu_conv(g, x, channels, 1, dropout), 2)


def _imagenet(
    g: GraphBuilder, x: str, classes: int, *, layers: tuple[int, ...], growth: int
) -> tuple[str]:
    x = g.conv(x, 2 * growth, 7, stride=2, padding=3, bias=False)
    x = g.max_pool(g.relu(g.batch_norm(x)), 3, 2, 1)
    for i, count in enumerate(layers):
        with g.scope(f"block{i + 1}"):
            x = x if i == 0 else _transition(g, x, 0.5, 0.0)
            x = _dense_block(g, x, count, growth, bottleneck=True, dropout=0.0)
    return _classified(g, x, classes)


def _cifar(
    g: GraphBuilder, x: str, classes: int, *, layers: int, growth: int
) -> tuple[str]:
    """Build three blocks without bottlenecks, with dropout of 0.2."""
    x = g.conv(x, 16, 3, padding=1, bias=False)
    for i in range(3):
        with g.scope(f"block{i + 1}"):
            x = x if i == 0 else _transition(g, x, 1.0, 0.2)
            x = _dense_block(g, x, layers, growth, bottleneck=False, dropout=0.2)
    return _classified(g, x, classes)


def _classified(g: GraphBuilder, x: str, classes: int) -> tuple[str]:
    x = g.global_avg_pool(g.relu(g.batch_norm(x)))
    return (g.linear(g.flatten(x), classes),)


densenet40 = Model(partial(_cifar, layers=12, growth=12), (3, 32, 32), 10)
"""40 layers with growth rate 12 for CIFAR: 1 019 722 parameters."""

densenet121 = Model(
    partial(_imagenet, layers=(6, 12, 24, 16), growth=32), (3, 224, 224), 1000
)
"""DenseNet-BC for ImageNet: 7 978 856 parameters."""
