"""Residual networks for ImageNet and CIFAR-10, of any depth.

A bottleneck has its stride in the 3 x 3 convolution, as in common implementations,
instead of in the first; the parameters are the same.

Sources: K. He et al., "Deep Residual Learning for Image Recognition", 2016, table 1; L.
Wang et al., "SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural
Networks", 2018, for the family.
"""

from collections.abc import Callable, Sequence
from functools import partial

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.initializers import HeNormal, LecunUniform
from mucudnn.models.model import Model

Block = Callable[[GraphBuilder, str, int, int], str]
"""(builder, x, width, stride) -> output of the residual block."""


def _imagenet_conv_bn(
    g: GraphBuilder, x: str, channels: int, kernel: int, stride: int = 1
) -> str:
    x = g.conv(
        x,
        channels,
        kernel,
        stride=stride,
        padding=kernel // 2,
        bias=False,
        initializer=HeNormal(fan_out=True),
    )
    return g.batch_norm(x)


def _basic(g: GraphBuilder, x: str, width: int, stride: int) -> str:
    y = g.relu(_imagenet_conv_bn(g, x, width, 3, stride))
    return _add_shortcut(g, x, _imagenet_conv_bn(g, y, width, 3), stride)


def _bottleneck(
    g: GraphBuilder, x: str, width: int, stride: int, *, step_first: bool = False
) -> str:
    first, second = (stride, 1) if step_first else (1, stride)
    y = g.relu(_imagenet_conv_bn(g, x, width, 1, first))
    y = g.relu(_imagenet_conv_bn(g, y, width, 3, second))
    return _add_shortcut(g, x, _imagenet_conv_bn(g, y, 4 * width, 1), stride)


def _add_shortcut(g: GraphBuilder, x: str, y: str, stride: int) -> str:
    """Add the shortcut (a projection where the shape changes) and apply ReLU."""
    channels = g.shape(y)[1]
    if stride != 1 or g.shape(x)[1] != channels:
        with g.scope("shortcut"):
            x = _imagenet_conv_bn(g, x, channels, 1, stride)
    return g.relu(g.add(y, x))


def _imagenet_body(
    g: GraphBuilder,
    x: str,
    classes: int,
    *,
    block: Block,
    depths: Sequence[int],
    pool_padding: int = 1,
) -> tuple[str]:
    x = g.relu(_imagenet_conv_bn(g, x, 64, 7, 2))
    x = g.max_pool(x, 3, 2, pool_padding)
    for stage, depth in enumerate(depths):
        for i in range(depth):
            with g.scope(f"stage{stage + 1}/block{i + 1}"):
                stride = 2 if stage > 0 and i == 0 else 1
                x = block(g, x, 64 << stage, stride)
    x = g.flatten(g.global_avg_pool(x))
    return (g.linear(x, classes, initializer=LecunUniform(1 / 3)),)


def _imagenet_resnet(block: Block, *depths: int) -> Model:
    return Model(
        partial(_imagenet_body, block=block, depths=depths), (3, 224, 224), 1000
    )


resnet18 = _imagenet_resnet(_basic, 2, 2, 2, 2)
"""11 689 512 parameters."""

resnet34 = _imagenet_resnet(_basic, 3, 4, 6, 3)
"""21 797 672 parameters."""

resnet50 = _imagenet_resnet(_bottleneck, 3, 4, 6, 3)
"""25 557 032 parameters."""

resnet101 = _imagenet_resnet(_bottleneck, 3, 4, 23, 3)
"""44 549 160 parameters."""

resnet152 = _imagenet_resnet(_bottleneck, 3, 8, 36, 3)
"""60 192 808 parameters."""


def resnet_superneurons(n3: int, *, n1: int = 6, n2: int = 32, n4: int = 6) -> Model:
    """Return a network of bottlenecks of depth 3 (n1 + n2 + n3 + n4) + 2.

    As in the paper: 227 x 227 pixels, strides in the first convolution of a bottleneck,
    and a first pooling without padding. The paper increases the depth by `n3`.

    Raises:
        ValueError: A stage has no block.
    """
    depths = (n1, n2, n3, n4)
    if min(depths) < 1:
        raise ValueError(f"every stage needs a block, got {depths}")
    block = partial(_bottleneck, step_first=True)
    body = partial(_imagenet_body, block=block, depths=depths, pool_padding=0)
    return Model(body, (3, 227, 227), 1000)


# Residual networks for CIFAR: 6n + 2 layers, shortcuts without parameters.
#
# Where the shape changes, the shortcut takes every second pixel and pads channels with
# zeros (the paper's option A), half of them on each side.
#
# Source: K. He et al., "Deep Residual Learning for Image Recognition", 2016, section
# 4.2.


def _cifar_conv_bn(g: GraphBuilder, x: str, channels: int, stride: int = 1) -> str:
    start = HeNormal()
    x = g.conv(x, channels, 3, stride=stride, padding=1, bias=False, initializer=start)
    return g.batch_norm(x)


def _block(g: GraphBuilder, x: str, channels: int, stride: int) -> str:
    y = g.relu(_cifar_conv_bn(g, x, channels, stride))
    y = _cifar_conv_bn(g, y, channels)
    if stride != 1:
        x = g.avg_pool(x, 1, stride)  # windows of one pixel: subsampling
    missing = channels - g.shape(x)[1]
    if missing:
        before, after = missing // 2, missing - missing // 2
        x = g.pad(x, (0, before, 0, 0), (0, after, 0, 0))
    return g.relu(g.add(y, x))


def _cifar_body(g: GraphBuilder, x: str, classes: int, *, blocks: int) -> tuple[str]:
    x = g.relu(_cifar_conv_bn(g, x, 16))
    for stage, channels in enumerate((16, 32, 64)):
        for i in range(blocks):
            with g.scope(f"stage{stage + 1}/block{i + 1}"):
                x = _block(g, x, channels, 2 if stage > 0 and i == 0 else 1)
    return (g.linear(g.flatten(g.global_avg_pool(x)), classes),)


resnet20, resnet32, resnet44, resnet56, resnet110 = (
    Model(partial(_cifar_body, blocks=blocks), (3, 32, 32), 10)
    for blocks in (3, 5, 7, 9, 18)
)
