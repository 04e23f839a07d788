"""How large a batch, and how deep a network, a GPU's memory holds.

Beside the tensors of `superneurons` stand the batch itself and 12 bytes a parameter of
convolutions and classifiers (value, gradient, momentum); workspace is left out.
"""

from collections.abc import Callable

from bench.papers.layers import FLOAT, Network
from bench.papers.networks import resnet
from bench.papers.superneurons import TECHNIQUES, curve, route

GIB = 1 << 30
STATIC = 3 * FLOAT
"""Bytes of a parameter, its gradient and its momentum."""

BASELINE = "baseline"
"""The technique that keeps all tensors at once."""


def bytes_an_image(network: Network, technique: str) -> int:
    """Peak of the tensors, without the batch itself.

    Args:
        network: Any.
        technique: Of `TECHNIQUES`, or "baseline".
    """
    way = route(network)
    if technique == BASELINE:
        return sum(way.sizes.values())
    return curve(way, *TECHNIQUES[technique]).peak


def needed(network: Network, technique: str, batch: int) -> int:
    """Bytes to train at a batch size: tensors, batch, parameters."""
    image = bytes_an_image(network, technique) + FLOAT * network.numel("data")
    return batch * image + STATIC * network.parameters


def largest_batch(network: Network, technique: str, nbytes: int) -> int:
    """The largest batch that `nbytes` hold; 0 if not one image does."""
    image = bytes_an_image(network, technique) + FLOAT * network.numel("data")
    return max(0, (nbytes - STATIC * network.parameters) // image)


def deepest(technique: str, batch: int, nbytes: int) -> int:
    """The deepest bottleneck ResNet that `nbytes` hold, by its third stage.

    The stages have 6, 32, n and 6 blocks, so that it is 3 n + 134 layers deep; 0 if
    even n = 1 does not fit.
    """

    def fits(n: int) -> bool:
        return needed(resnet((6, 32, n, 6)), technique, batch) <= nbytes

    n = _last(fits)
    return 3 * n + 134 if n else 0


def _last(holds: Callable[[int], bool]) -> int:
    """The largest n >= 1 for which `holds` still does, else 0."""
    beyond = 1
    while holds(beyond):
        beyond *= 2
    low = beyond // 2
    while beyond - low > 1:
        middle = (low + beyond) // 2
        if holds(middle):
            low = middle
        else:
            beyond = middle
    return low
