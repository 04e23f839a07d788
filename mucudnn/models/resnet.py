"""Residual networks for ImageNet, and a family of any depth.

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

__all__ = [
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet_superneurons",
]

Block = Callable[[GraphBuilder, str, int, int], str]
"""(builder, x, width, stride) -> output of the residual block."""


def _conv_bn(
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
    y = g.relu(_conv_bn(g, x, width, 3, stride))
    return _add_shortcut(g, x, _conv_bn(g, y, width, 3), stride)


def _bottleneck(
    g: GraphBuilder, x: str, width: int, stride: int, *, step_first: bool = False
) -> str:
    first, second = (stride, 1) if step_first else (1, stride)
    y = g.relu(_conv_bn(g, x, width, 1, first))
    y = g.relu(_conv_bn(g, y, width, 3, second))
    return _add_shortcut(g, x, _conv_bn(g, y, 4 * width, 1), stride)


def _add_shortcut(g: GraphBuilder, x: str, y: str, stride: int) -> str:
    """Add the shortcut (a projection where the shape changes) and apply ReLU."""
    channels = g.shape(y)[1]
    if stride != 1 or g.shape(x)[1] != channels:
        with g.scope("shortcut"):
            x = _conv_bn(g, x, channels, 1, stride)
    return g.relu(g.add(y, x))


def _body(
    g: GraphBuilder,
    x: str,
    classes: int,
    *,
    block: Block,
    depths: Sequence[int],
    pool_padding: int = 1,
) -> tuple[str]:
    x = g.relu(_conv_bn(g, x, 64, 7, 2))
    x = g.max_pool(x, 3, 2, pool_padding)
    for stage, depth in enumerate(depths):
        for i in range(depth):
            with g.scope(f"stage{stage + 1}/block{i + 1}"):
                stride = 2 if stage > 0 and i == 0 else 1
                x = block(g, x, 64 << stage, stride)
    x = g.flatten(g.global_avg_pool(x))
    return (g.linear(x, classes, initializer=LecunUniform(1 / 3)),)


def _resnet(block: Block, *depths: int) -> Model:
    return Model(partial(_body, block=block, depths=depths), (3, 224, 224), 1000)


resnet18 = _resnet(_basic, 2, 2, 2, 2)
"""11 689 512 parameters."""

resnet34 = _resnet(_basic, 3, 4, 6, 3)
"""21 797 672 parameters."""

resnet50 = _resnet(_bottleneck, 3, 4, 6, 3)
"""25 557 032 parameters."""

resnet101 = _resnet(_bottleneck, 3, 4, 23, 3)
"""44 549 160 parameters."""

resnet152 = _resnet(_bottleneck, 3, 8, 36, 3)
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
    body = partial(_body, block=block, depths=depths, pool_padding=0)
    return Model(body, (3, 227, 227), 1000)
