"""The classifier of AlexNet, OverFeat and VGG: three dense layers."""

from collections.abc import Sequence

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.initializers import Constant, Initializer

__all__ = ["dense_head"]


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
