"""Residual networks for CIFAR: 6n + 2 layers, shortcuts without parameters.

Where the shape changes, the shortcut takes every second pixel and pads channels with
zeros (the paper's option A), half of them on each side.

Source: K. He et al., "Deep Residual Learning for Image Recognition", 2016, section 4.2.
"""

from functools import partial

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.initializers import HeNormal
from mucudnn.models.model import Model

__all__ = ["resnet20", "resnet32", "resnet44", "resnet56", "resnet110"]


def _conv_bn(g: GraphBuilder, x: str, channels: int, stride: int = 1) -> str:
    start = HeNormal()
    x = g.conv(x, channels, 3, stride=stride, padding=1, bias=False, initializer=start)
    return g.batch_norm(x)


def _block(g: GraphBuilder, x: str, channels: int, stride: int) -> str:
    y = g.relu(_conv_bn(g, x, channels, stride))
    y = _conv_bn(g, y, channels)
    if stride != 1:
        x = g.avg_pool(x, 1, stride)  # windows of one pixel: subsampling
    missing = channels - g.shape(x)[1]
    if missing:
        before, after = missing // 2, missing - missing // 2
        x = g.pad(x, (0, before, 0, 0), (0, after, 0, 0))
    return g.relu(g.add(y, x))


def _body(g: GraphBuilder, x: str, classes: int, *, blocks: int) -> tuple[str]:
    x = g.relu(_conv_bn(g, x, 16))
    for stage, channels in enumerate((16, 32, 64)):
        for i in range(blocks):
            with g.scope(f"stage{stage + 1}/block{i + 1}"):
                x = _block(g, x, channels, 2 if stage > 0 and i == 0 else 1)
    return (g.linear(g.flatten(g.global_avg_pool(x)), classes),)


resnet20, resnet32, resnet44, resnet56, resnet110 = (
    Model(partial(_body, blocks=blocks), (3, 32, 32), 10) for blocks in (3, 5, 7, 9, 18)
)
