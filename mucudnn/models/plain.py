"""Plain stacks of convolutions with dense heads: AlexNet, VGG, OverFeat, LeNet.

Sources of AlexNet: A. Krizhevsky, I. Sutskever and G. Hinton, "ImageNet Classification
with Deep Convolutional Neural Networks", 2012, without its division into two groups; A.
Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
"""

from collections.abc import Sequence
from functools import partial

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.initializers import Constant, Initializer, LecunUniform, Normal
from mucudnn.models.model import Model


def _alexnet(g: GraphBuilder, x: str, classes: int) -> tuple[str]:
    """Build the layers; section 5 has the initial deviation 0.01."""
    # The first layer's is that of pixels from 0 to 255 divided by their deviation, 60.
    # Biases of 1 gave Caffe's authors a flat loss (models/bvlc_alexnet/readme.md).
    start, raised = Normal(0.01), Constant(0.1)
    x = g.relu(g.conv(x, 96, 11, stride=4, initializer=Normal(0.6)))
    x = g.max_pool(_normalised(g, x), 3, 2)
    x = g.relu(g.conv(x, 256, 5, padding=2, bias=raised, initializer=start))
    x = g.max_pool(_normalised(g, x), 3, 2)
    x = g.relu(g.conv(x, 384, 3, padding=1, initializer=start))
    x = g.relu(g.conv(x, 384, 3, padding=1, bias=raised, initializer=start))
    x = g.relu(g.conv(x, 256, 3, padding=1, bias=raised, initializer=start))
    x = g.max_pool(x, 3, 2)
    return (dense_head(g, x, (4096, 4096), classes, initializer=start, bias=0.1),)


def _normalised(g: GraphBuilder, x: str) -> str:
    """Apply section 3.3; the paper does not divide alpha, 1e-4, by the 5 channels."""
    return g.lrn(x, size=5, alpha=5e-4, beta=0.75, k=2.0)


def _one_weird_trick(g: GraphBuilder, x: str, classes: int) -> tuple[str]:
    start = LecunUniform(1 / 3)
    x = g.relu(g.conv(x, 64, 11, stride=4, padding=2, initializer=start))
    x = g.max_pool(x, 3, 2)
    x = g.relu(g.conv(x, 192, 5, padding=2, initializer=start))
    x = g.max_pool(x, 3, 2)
    for channels in (384, 256, 256):
        x = g.relu(g.conv(x, channels, 3, padding=1, initializer=start))
    x = g.max_pool(x, 3, 2)
    hidden = (4096, 4096)
    return (dense_head(g, x, hidden, classes, initializer=start, dropout_first=True),)


alexnet = Model(_alexnet, (3, 227, 227), 1000)
"""96-256-384-384-256 with local response normalisation: 62 378 344 parameters."""

alexnet_owt = Model(_one_weird_trick, (3, 224, 224), 1000)
"""64-192-384-256-256 without normalisation: 61 100 840 parameters."""


def dense_head(
    g: GraphBuilder,
    x: str,
    hidden: Sequence[int],
    classes: int,
    *,
    initializer: Initializer,
    bias: float = 0.0,
    dropout_first: bool = False,
) -> str:
    """Append hidden layers with dropout of one half, and the output layer.

    `bias` is the initial bias of hidden layers. `dropout_first` puts dropout before
    each of them instead of after it.
    """
    x = g.flatten(x)
    for features in hidden:
        x = g.dropout(x) if dropout_first else x
        x = g.linear(x, features, bias=Constant(bias), initializer=initializer)
        x = g.relu(x)
        x = x if dropout_first else g.dropout(x)
    return g.linear(x, classes, initializer=initializer)


# VGG, and the very deep networks derived from it.
#
# Sources: K. Simonyan and A. Zisserman, "Very Deep Convolutional Networks for Large-
# Scale Image Recognition", 2015, table 1, configurations D and E; M. Rhu et al., "vDNN:
# Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network
# Design", 2016, for the deep ones: 20 more convolutions in each of the five groups per
# hundred.


_CHANNELS = (64, 128, 256, 512, 512)
_VGG16 = (2, 2, 3, 3, 3)
_VGG19 = (2, 2, 4, 4, 4)


def _vgg_body(
    g: GraphBuilder, x: str, classes: int, *, depths: tuple[int, ...]
) -> tuple[str]:
    for channels, depth in zip(_CHANNELS, depths, strict=True):
        for _ in range(depth):
            x = g.relu(g.conv(x, channels, 3, padding=1))
        x = g.max_pool(x, 2)
    return (dense_head(g, x, (4096, 4096), classes, initializer=Normal(0.01)),)


def _vgg(depths: tuple[int, ...], more: int = 0) -> Model:
    deeper = tuple(depth + more for depth in depths)
    return Model(partial(_vgg_body, depths=deeper), (3, 224, 224), 1000)


vgg16 = _vgg(_VGG16)
"""138 357 544 parameters."""

vgg19 = _vgg(_VGG19)
"""143 667 240 parameters."""

vgg116, vgg216, vgg316, vgg416 = (_vgg(_VGG16, more) for more in (20, 40, 60, 80))


# OverFeat's fast model.
#
# Source: P. Sermanet et al., "OverFeat: Integrated Recognition, Localization and
# Detection using Convolutional Networks", 2014, table 1.


def _overfeat_body(g: GraphBuilder, x: str, classes: int) -> tuple[str]:
    start = Normal(0.01)
    x = g.max_pool(g.relu(g.conv(x, 96, 11, stride=4, initializer=start)), 2)
    x = g.max_pool(g.relu(g.conv(x, 256, 5, initializer=start)), 2)
    for channels in (512, 1024, 1024):
        x = g.relu(g.conv(x, channels, 3, padding=1, initializer=start))
    x = g.max_pool(x, 2)
    return (dense_head(g, x, (3072, 4096), classes, initializer=start),)


overfeat = Model(_overfeat_body, (3, 231, 231), 1000)
"""The fast model: 145 920 872 parameters."""


# Small networks: Caffe's quick CIFAR-10 network, a network for digits, LeNet.


def _cifar_body(g: GraphBuilder, x: str, classes: int) -> tuple[str]:
    """Build the layers; poolings keep partial windows: 32 -> 16 -> 8 -> 4 pixels."""
    x = g.conv(x, 32, 5, padding=2, initializer=Normal(1e-4))
    x = g.relu(g.max_pool(x, 3, 2, ceil_mode=True))
    for channels in (32, 64):
        x = g.relu(g.conv(x, channels, 5, padding=2, initializer=Normal(0.01)))
        x = g.avg_pool(x, 3, 2, ceil_mode=True)
    x = g.linear(g.flatten(x), 64, initializer=Normal(0.1))
    return (g.linear(x, classes, initializer=Normal(0.1)),)


cifar_quick = Model(_cifar_body, (3, 32, 32), 10)
"""The quick network: 145 578 parameters."""


def _digits_body(g: GraphBuilder, x: str, classes: int) -> tuple[str]:
    for channels in (16, 32):
        x = g.relu(g.conv(x, channels, 3, padding=1))
        x = g.max_pool(x, 2)
    x = g.relu(g.linear(g.flatten(x), 64))
    return (g.linear(x, classes),)


digits = Model(_digits_body, (1, 8, 8), 10)
"""Two convolutions and two dense layers for the handwritten digits."""


def _lenet_body(g: GraphBuilder, x: str, classes: int) -> tuple[str]:
    """Build LeNet with the sizes and the initialization of Caffe's.

    Source: Y. LeCun et al., "Gradient-Based Learning Applied to Document Recognition",
    1998; with max pooling and ReLU instead of their older forms.
    """
    start = LecunUniform()
    x = g.max_pool(g.conv(x, 20, 5, initializer=start), 2)
    x = g.max_pool(g.conv(x, 50, 5, initializer=start), 2)
    x = g.relu(g.linear(g.flatten(x), 500, initializer=start))
    return (g.linear(x, classes, initializer=start),)


lenet = Model(_lenet_body, (1, 28, 28), 10)
"""LeNet on 28 x 28 pixels: 431 080 parameters."""
