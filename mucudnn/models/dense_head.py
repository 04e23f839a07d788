"""The classifier that AlexNet, OverFeat and VGG end in: three dense layers."""

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
    """Hidden layers with dropout of one half, and the layer of the classes.

    `bias` is what hidden layers start with; `dropout_first` says whether dropout comes
    before each of them rather than behind.
    """
    x = g.flatten(x)
    for features in hidden:
        x = g.dropout(x) if dropout_first else x
        x = g.linear(x, features, bias=Constant(bias), initializer=initializer)
        x = g.relu(x)
        x = x if dropout_first else g.dropout(x)
    return g.linear(x, classes, initializer=initializer)
