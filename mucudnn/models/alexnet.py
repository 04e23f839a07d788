"""AlexNet in one tower: the network of 2012, and the smaller one of 2014.

Sources: A. Krizhevsky, I. Sutskever and G. Hinton, "ImageNet Classification with Deep
Convolutional Neural Networks", 2012, without its division into two groups; A.
Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
"""

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.initializers import Constant, LecunUniform, Normal
from mucudnn.models.dense_head import dense_head
from mucudnn.models.model import Model

__all__ = ["alexnet", "alexnet_owt"]


def _alexnet(g: GraphBuilder, x: str, classes: int) -> tuple[str]:
    """Build the layers; section 5 has the initial deviation 0.01 and biases of 1."""
    start, one = Normal(0.01), Constant(1.0)
    x = g.relu(g.conv(x, 96, 11, stride=4, initializer=start))
    x = g.max_pool(_normalised(g, x), 3, 2)
    x = g.relu(g.conv(x, 256, 5, padding=2, bias=one, initializer=start))
    x = g.max_pool(_normalised(g, x), 3, 2)
    x = g.relu(g.conv(x, 384, 3, padding=1, initializer=start))
    x = g.relu(g.conv(x, 384, 3, padding=1, bias=one, initializer=start))
    x = g.relu(g.conv(x, 256, 3, padding=1, bias=one, initializer=start))
    x = g.max_pool(x, 3, 2)
    return (dense_head(g, x, (4096, 4096), classes, initializer=start, bias=1.0),)


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
