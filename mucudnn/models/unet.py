"""U-Nets in two and three dimensions with padded convolutions.

The output has the size of the image, which must be divisible by two for every level.
(The originals do not pad convolutions, and crop their skips.)

Sources: O. Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image
Segmentation", 2015; Ö. Çiçek et al., "3D U-Net: Learning Dense Volumetric Segmentation
from Sparse Annotation", 2016.
"""

from functools import partial

from mucudnn.arguments import check_integer
from mucudnn.ir.builder import GraphBuilder
from mucudnn.models.model import Model

Pair = tuple[int, int]
"""Channels of the two convolutions at one resolution."""


def _convs(g: GraphBuilder, x: str, pair: Pair, batch_norm: bool) -> str:
    for channels in pair:
        x = g.conv(x, channels, 3, padding=1)
        x = g.relu(g.batch_norm(x) if batch_norm else x)
    return x


def _body(
    g: GraphBuilder,
    x: str,
    classes: int,
    *,
    pairs: tuple[Pair, ...],
    halving: bool,
    batch_norm: bool,
) -> tuple[str]:
    """Build the levels down and up.

    On the way up, the 2-D original halves the channels; the 3-D one keeps them and has
    no bias there, without which its size would not be the paper's 19 069 955.
    """
    steps = len(pairs) - 1
    if any(size % 2**steps for size in g.shape(x)[2:]):
        raise ValueError(
            f"an image of {g.shape(x)[2:]} cannot be halved {steps} times; its sizes "
            f"must be multiples of {2**steps}"
        )
    skips = []
    for i, pair in enumerate(pairs):
        with g.scope(f"down{i}"):
            x = _convs(g, g.max_pool(x, 2) if i else x, pair, batch_norm)
        skips.append(x)
    for i in reversed(range(steps)):
        with g.scope(f"up{i}"):
            channels = g.shape(x)[1] // 2 if halving else g.shape(x)[1]
            up = g.conv_transpose(x, channels, 2, stride=2, bias=halving)
            x = g.concat((skips[i], up))
            x = _convs(g, x, (pairs[i][1], pairs[i][1]), batch_norm)
    return (g.conv(x, classes, 1),)


def narrow_unet2d(channels: int, *, batch_norm: bool = False) -> Model:
    """Return a 2-D U-Net with `channels` at the finest level; the original has 64."""
    width = check_integer("channels", channels, least=1)
    pairs = tuple((width << i, width << i) for i in range(5))
    body = partial(_body, pairs=pairs, halving=True, batch_norm=batch_norm)
    return Model(body, (1, 512, 512), 2)


def narrow_unet3d(channels: int, *, batch_norm: bool = True) -> Model:
    """Return a 3-D U-Net with `channels` in its first layer; the original has 32."""
    width = check_integer("channels", channels, least=1)
    pairs = tuple((width << i, 2 * width << i) for i in range(4))
    body = partial(_body, pairs=pairs, halving=False, batch_norm=batch_norm)
    return Model(body, (3, 64, 64, 64), 3)


unet2d = narrow_unet2d(64)
"""31 030 658 parameters."""

unet2d_bn = narrow_unet2d(64, batch_norm=True)
"""With batch norm."""

unet3d = narrow_unet3d(32)
"""With batch norm: 19 074 627 parameters."""

unet3d_plain = narrow_unet3d(32, batch_norm=False)
"""19 069 955 parameters."""
