"""VGG, and the very deep networks derived from it.

Sources: K. Simonyan and A. Zisserman, "Very Deep Convolutional Networks for Large-Scale
Image Recognition", 2015, table 1, configurations D and E; M. Rhu et al., "vDNN:
Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design",
2016, for the deep ones: 20 more convolutions in each of the five groups per hundred.
"""

from functools import partial

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.initializers import Normal
from mucudnn.models.dense_head import dense_head
from mucudnn.models.model import Model

__all__ = ["vgg16", "vgg19", "vgg116", "vgg216", "vgg316", "vgg416"]

_CHANNELS = (64, 128, 256, 512, 512)
_VGG16 = (2, 2, 3, 3, 3)
_VGG19 = (2, 2, 4, 4, 4)


def _body(
    g: GraphBuilder, x: str, classes: int, *, depths: tuple[int, ...]
) -> tuple[str]:
    for channels, depth in zip(_CHANNELS, depths, strict=True):
        for _ in range(depth):
            x = g.relu(g.conv(x, channels, 3, padding=1))
        x = g.max_pool(x, 2)
    return (dense_head(g, x, (4096, 4096), classes, initializer=Normal(0.01)),)


def _vgg(depths: tuple[int, ...], more: int = 0) -> Model:
    deeper = tuple(depth + more for depth in depths)
    return Model(partial(_body, depths=deeper), (3, 224, 224), 1000)


vgg16 = _vgg(_VGG16)
"""138 357 544 parameters."""

vgg19 = _vgg(_VGG19)
"""143 667 240 parameters."""

vgg116, vgg216, vgg316, vgg416 = (_vgg(_VGG16, more) for more in (20, 40, 60, 80))
