"""GoogLeNet and Inception-v4: concatenated branches of convolutions.

GoogLeNet is as published: local response normalization, no batch norm, two side heads.
For small images the pooling window of a side head is cut to the feature map.

Source: C. Szegedy et al., "Going Deeper with Convolutions", 2015, section 5 and table
1.
"""

from functools import partial

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.initializers import Constant, LecunUniform
from mucudnn.models.model import Model

_START = LecunUniform()
_BIAS = Constant(0.2)

_BLOCKS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Channels: 1x1, before 3x3, 3x3, before 5x5, 5x5, after the pooling."""

_POOLED = ("3b", "4e")
_SIDE_HEADS = ("4a", "4d")


def _conv(
    g: GraphBuilder, x: str, channels: int, kernel: int = 1, stride: int = 1
) -> str:
    x = g.conv(
        x,
        channels,
        kernel,
        stride=stride,
        padding=kernel // 2,
        bias=_BIAS,
        initializer=_START,
    )
    return g.relu(x)


def _inception(g: GraphBuilder, x: str, channels: tuple[int, ...]) -> str:
    one, before_three, three, before_five, five, pooled = channels
    branches = (
        _conv(g, x, one),
        _conv(g, _conv(g, x, before_three), three, 3),
        _conv(g, _conv(g, x, before_five), five, 5),
        _conv(g, g.max_pool(x, 3, 1, 1), pooled),
    )
    return g.concat(branches)


def _side_head(g: GraphBuilder, x: str, classes: int) -> str:
    window = tuple(min(5, size) for size in g.shape(x)[2:])
    x = _conv(g, g.avg_pool(x, window, 3, ceil_mode=True), 128)
    x = g.linear(g.flatten(x), 1024, bias=_BIAS, initializer=_START)
    return g.linear(g.dropout(g.relu(x), 0.7), classes, initializer=_START)


def _googlenet_body(
    g: GraphBuilder, x: str, classes: int, *, side_heads: bool
) -> tuple[str, ...]:
    x = g.max_pool(_conv(g, x, 64, 7, 2), 3, 2, ceil_mode=True)
    x = _conv(g, _conv(g, g.lrn(x), 64), 192, 3)
    x = g.max_pool(g.lrn(x), 3, 2, ceil_mode=True)
    sides = []
    for name, channels in _BLOCKS.items():
        with g.scope(f"inception_{name}"):
            x = _inception(g, x, channels)
        if name in _POOLED:
            x = g.max_pool(x, 3, 2, ceil_mode=True)
        if name in _SIDE_HEADS and side_heads and g.training:
            with g.scope(f"side_{name}"):
                sides.append(_side_head(g, x, classes))
    x = g.dropout(g.flatten(g.global_avg_pool(x)), 0.4)
    return (g.linear(x, classes, initializer=_START), *sides)


googlenet = Model(partial(_googlenet_body, side_heads=True), (3, 224, 224), 1000, 0.3)
"""With its side heads while training: 13 378 280 parameters, 6 998 552 without."""

googlenet_plain = Model(partial(_googlenet_body, side_heads=False), (3, 224, 224), 1000)
"""Never with side heads."""


# Inception-v4: every convolution has batch norm and no bias.
#
# Source: C. Szegedy et al., "Inception-v4, Inception-ResNet and the Impact of Residual
# Connections on Learning", 2017, figures 3 to 9.


_Layer = tuple[int, int, int]
"""(channels, kernel height, kernel width), padded to keep the size."""


def _normed(
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
        x = _normed(g, x, channels, (high, wide), padding=(high // 2, wide // 2))
    return x


def _pooled(g: GraphBuilder, x: str, channels: int) -> str:
    x = g.avg_pool(x, 3, 1, 1, count_include_pad=False)
    return _normed(g, x, channels, 1)


def _stem(g: GraphBuilder, x: str) -> str:
    x = _normed(g, x, 32, 3, stride=2)
    x = _normed(g, _normed(g, x, 32, 3), 64, 3, padding=1)
    x = g.concat((g.max_pool(x, 3, 2), _normed(g, x, 96, 3, stride=2)))
    short = _normed(g, _chain(g, x, (64, 1, 1)), 96, 3)
    long = _normed(g, _chain(g, x, (64, 1, 1), (64, 1, 7), (64, 7, 1)), 96, 3)
    x = g.concat((short, long))
    return g.concat((_normed(g, x, 192, 3, stride=2), g.max_pool(x, 3, 2)))


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
        _normed(g, x, 384, 3, stride=2),
        _normed(g, _chain(g, x, (192, 1, 1), (224, 3, 3)), 256, 3, stride=2),
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
        _normed(g, _chain(g, x, (192, 1, 1)), 192, 3, stride=2),
        _normed(g, deep, 320, 3, stride=2),
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


def _v4_body(g: GraphBuilder, x: str, classes: int) -> tuple[str]:
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


inception_v4 = Model(_v4_body, (3, 299, 299), 1000)
"""42 679 816 parameters."""
