"""A small network for 8 x 8 pixels that trains within seconds on a CPU."""

from mucudnn.ir.builder import GraphBuilder
from mucudnn.models.model import Model

__all__ = ["digits"]


def _body(g: GraphBuilder, x: str, classes: int) -> tuple[str]:
    for channels in (16, 32):
        x = g.relu(g.conv(x, channels, 3, padding=1))
        x = g.max_pool(x, 2)
    x = g.relu(g.linear(g.flatten(x), 64))
    return (g.linear(x, classes),)


digits = Model(_body, (1, 8, 8), 10)
"""Two convolutions and two dense layers for the handwritten digits."""
