"""Caffe's quick network for CIFAR-10, after cuda-convnet's.

Its poolings keep partial windows (32 -> 16 -> 8 -> 4 pixels).
"""

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.initializers import Normal
from mucudnn.models.model import Model

__all__ = ["cifar_quick"]


def _body(g: GraphBuilder, x: str, classes: int) -> tuple[str]:
    x = g.conv(x, 32, 5, padding=2, initializer=Normal(1e-4))
    x = g.relu(g.max_pool(x, 3, 2, ceil_mode=True))
    for channels in (32, 64):
        x = g.relu(g.conv(x, channels, 5, padding=2, initializer=Normal(0.01)))
        x = g.avg_pool(x, 3, 2, ceil_mode=True)
    x = g.linear(g.flatten(x), 64, initializer=Normal(0.1))
    return (g.linear(x, classes, initializer=Normal(0.1)),)


cifar_quick = Model(_body, (3, 32, 32), 10)
"""The quick network: 145 578 parameters."""
