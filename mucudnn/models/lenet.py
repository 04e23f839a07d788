"""LeNet for handwritten digits, with the sizes and the initialization of Caffe's.

Source: Y. LeCun et al., "Gradient-Based Learning Applied to Document Recognition",
1998; with max pooling and ReLU instead of their older forms.
"""

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.initializers import LecunUniform
from mucudnn.models.model import Model

__all__ = ["lenet"]


def _body(g: GraphBuilder, x: str, classes: int) -> tuple[str]:
    start = LecunUniform()
    x = g.max_pool(g.conv(x, 20, 5, initializer=start), 2)
    x = g.max_pool(g.conv(x, 50, 5, initializer=start), 2)
    x = g.relu(g.linear(g.flatten(x), 500, initializer=start))
    return (g.linear(x, classes, initializer=start),)


lenet = Model(_body, (1, 28, 28), 10)
"""LeNet on 28 x 28 pixels: 431 080 parameters."""
