"""OverFeat's fast model.

Source: P. Sermanet et al., "OverFeat: Integrated Recognition, Localization and
Detection using Convolutional Networks", 2014, table 1.
"""

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.initializers import Normal
from mucudnn.models.dense_head import dense_head
from mucudnn.models.model import Model

__all__ = ["overfeat"]


def _body(g: GraphBuilder, x: str, classes: int) -> tuple[str]:
    start = Normal(0.01)
    x = g.max_pool(g.relu(g.conv(x, 96, 11, stride=4, initializer=start)), 2)
    x = g.max_pool(g.relu(g.conv(x, 256, 5, initializer=start)), 2)
    for channels in (512, 1024, 1024):
        x = g.relu(g.conv(x, channels, 3, padding=1, initializer=start))
    x = g.max_pool(x, 2)
    return (dense_head(g, x, (3072, 4096), classes, initializer=start),)


overfeat = Model(_body, (3, 231, 231), 1000)
"""The fast model: 145 920 872 parameters."""
