"""Scalar losses and metrics."""

from typing import TYPE_CHECKING

from mucudnn.arguments import an_integer
from mucudnn.ir.layers.elementwise import common_shape
from mucudnn.ir.shapes import channels

if TYPE_CHECKING:
    from mucudnn.ir.builder import GraphBuilder

__all__ = ["accuracy", "mean_squared_error", "softmax_cross_entropy"]


def softmax_cross_entropy(g: "GraphBuilder", logits: str, labels: str) -> str:
    """Compute the mean of -log softmax(logits)[label] over samples and pixels."""
    _check_labels(g, logits, labels)
    logarithms = ("log_probabilities", g.shape(logits), g.spec(logits).dtype)
    return g.append("softmax_cross_entropy", (logits, labels), (), (logarithms,))


def mean_squared_error(g: "GraphBuilder", prediction: str, target: str) -> str:
    """Compute the mean of the squared differences."""
    common_shape(g, prediction, target)
    return g.append("mean_squared_error", (prediction, target), ())


def accuracy(g: "GraphBuilder", logits: str, labels: str, k: int = 1) -> str:
    """Count the samples (pixels) whose label is among the k largest logits."""
    _check_labels(g, logits, labels)
    an_integer("k", k, least=1)
    return g.append("accuracy", (logits, labels), (), k=k)


def _check_labels(g: "GraphBuilder", logits: str, labels: str) -> None:
    channels(logits, g.shape(logits))
    n, _, *spatial = g.shape(logits)
    if g.shape(labels) != (n, *spatial) or g.spec(labels).dtype != "int64":
        raise ValueError(
            f"labels must be int64 {(n, *spatial)} for logits {g.shape(logits)}, "
            f"got {g.spec(labels).dtype} {g.shape(labels)}"
        )
