"""Inception-v4: every convolution has batch norm and no bias.

Source: C. Szegedy et al., "Inception-v4, Inception-ResNet and the Impact of Residual
Connections on Learning", 2017, figures 3 to 9.
"""

from mucudnn.ir.builder import GraphBuilder
from mucudnn.models.model import Model

_Layer = tuple[int, int, int]
"""(channels, kernel height, kernel width), padded to keep the size."""


def _conv(
    g: GraphBuilder,
    x: str,
    channels: int,
    kernel: int | tuple[int, int],
    *,
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
) -> str:
    x = g.conv(x, channels, kernel, stride=stride, padding=padding, bias=False)
    return g.relu(g.batch_norm(x, eps=1e-3))


def _chain(g: GraphBuilder, x: str, *layers: _Layer) -> str:
    for channels, high, wide in layers:
        x = _conv(g, x, channels, (high, wide), padding=(high // 2, wide // 2))
    return x


def _pooled(g: GraphBuilder, x: str, channels: int) -> str:
    x = g.avg_pool(x, 3, 1, 1, count_include_pad=False)
    return _conv(g, x, channels, 1)


def _stem(g: GraphBuilder, x: str) -> str:
    x = _conv(g, x, 32, 3, stride=2)
    x = _conv(g, _conv(g, x, 32, 3), 64, 3, padding=1)
    x = g.concat((g.max_pool(x, 3, 2), _conv(g, x, 96, 3, stride=2)))
    short = _conv(g, _chain(g, x, (64, 1, 1)), 96, 3)
    long = _conv(g, _chain(g, x, (64, 1, 1), (64, 1, 7), (64, 7, 1)), 96, 3)
    x = g.concat((short, long))
    return g.concat((_conv(g, x, 192, 3, stride=2), g.max_pool(x, 3, 2)))


def _inception_a(g: GraphBuilder, x: str) -> str:
    branches = (
        _chain(g, x, (96, 1, 1)),
        _chain(g, x, (64, 1, 1), (96, 3, 3)),
        _chain(g, x, (64, 1, 1), (96, 3, 3), (96, 3, 3)),
        _pooled(g, x, 96),
    )
    return g.concat(branches)


def _reduction_a(g: GraphBuilder, x: str) -> str:
    branches = (
        _conv(g, x, 384, 3, stride=2),
        _conv(g, _chain(g, x, (192, 1, 1), (224, 3, 3)), 256, 3, stride=2),
        g.max_pool(x, 3, 2),
    )
    return g.concat(branches)


def _inception_b(g: GraphBuilder, x: str) -> str:
    twice = ((192, 7, 1), (224, 1, 7), (224, 7, 1), (256, 1, 7))
    branches = (
        _chain(g, x, (384, 1, 1)),
        _chain(g, x, (192, 1, 1), (224, 1, 7), (256, 7, 1)),
        _chain(g, x, (192, 1, 1), *twice),
        _pooled(g, x, 128),
    )
    return g.concat(branches)


def _reduction_b(g: GraphBuilder, x: str) -> str:
    deep = _chain(g, x, (256, 1, 1), (256, 1, 7), (320, 7, 1))
    branches = (
        _conv(g, _chain(g, x, (192, 1, 1)), 192, 3, stride=2),
        _conv(g, deep, 320, 3, stride=2),
        g.max_pool(x, 3, 2),
    )
    return g.concat(branches)


def _inception_c(g: GraphBuilder, x: str) -> str:
    narrow = _chain(g, x, (384, 1, 1))
    deep = _chain(g, x, (384, 1, 1), (448, 3, 1), (512, 1, 3))
    branches = (
        _chain(g, x, (256, 1, 1)),
        _chain(g, narrow, (256, 1, 3)),
        _chain(g, narrow, (256, 3, 1)),
        _chain(g, deep, (256, 1, 3)),
        _chain(g, deep, (256, 3, 1)),
        _pooled(g, x, 256),
    )
    return g.concat(branches)


def _body(g: GraphBuilder, x: str, classes: int) -> tuple[str]:
    stages = (
        (_inception_a, 4),
        (_reduction_a, 1),
        (_inception_b, 7),
        (_reduction_b, 1),
        (_inception_c, 3),
    )
    with g.scope("stem"):
        x = _stem(g, x)
    for block, count in stages:
        for _ in range(count):
            with g.scope(block.__name__.lstrip("_")):
                x = block(g, x)
    x = g.dropout(g.flatten(g.global_avg_pool(x)), 0.2)
    return (g.linear(x, classes),)


inception_v4 = Model(_body, (3, 299, 299), 1000)
"""42 679 816 parameters."""
