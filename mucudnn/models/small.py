"""Small networks: LeNet, Caffe's quick CIFAR-10 network, a network for digits.

Its poolings keep partial windows (32 -> 16 -> 8 -> 4 pixels).
"""

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.initializers import LecunUniform, Normal
from mucudnn.models.model import Model


def _cifar_body(g: GraphBuilder, x: str, classes: int) -> tuple[str]:
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


# LeNet for handwritten digits, with the sizes and the initialization of Caffe's.
#
# Source: Y. LeCun et al., "Gradient-Based Learning Applied to Document Recognition",
# 1998; with max pooling and ReLU instead of their older forms.


def _body(g: GraphBuilder, x: str, classes: int) -> tuple[str]:
    start = LecunUniform()
    x = g.max_pool(g.conv(x, 20, 5, initializer=start), 2)
    x = g.max_pool(g.conv(x, 50, 5, initializer=start), 2)
    x = g.relu(g.linear(g.flatten(x), 500, initializer=start))
    return (g.linear(x, classes, initializer=start),)


lenet = Model(_body, (1, 28, 28), 10)
"""LeNet on 28 x 28 pixels: 431 080 parameters."""
