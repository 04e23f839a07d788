"""Per-channel bias and the dense layer."""

from typing import TYPE_CHECKING

from mucudnn.arguments import an_integer
from mucudnn.ir.initializers import Constant, HeNormal, Initializer
from mucudnn.ir.shapes import channels

if TYPE_CHECKING:
    from mucudnn.ir.builder import GraphBuilder

__all__ = ["bias", "biased", "linear"]


def bias(g: "GraphBuilder", x: str, initializer: Initializer | None = None) -> str:
    """Add one number per channel (axis 1)."""
    start = Constant(0.0) if initializer is None else initializer
    b = g.parameter("bias", (channels(x, g.shape(x)),), start)
    return g.append("bias", (x, b), g.shape(x))


def biased(g: "GraphBuilder", x: str, how: bool | Initializer) -> str:
    """Add a bias if a layer's argument `bias` requests one."""
    if isinstance(how, bool):
        return bias(g, x) if how else x
    return bias(g, x, how)


def linear(
    g: "GraphBuilder",
    x: str,
    features: int,
    *,
    bias: bool | Initializer = True,
    initializer: Initializer | None = None,
    name: str = "linear",
) -> str:
    """Apply a dense layer from (N, F) to (N, features)."""
    shape = g.shape(x)
    if len(shape) != 2:
        raise ValueError(f"linear takes (N, F), got {shape}; flatten it first")
    an_integer("features", features, least=1)
    with g.scope(name):
        start = HeNormal() if initializer is None else initializer
        w = g.parameter("weight", (features, shape[1]), start)
        out = (shape[0], features)
        y = g.append("matmul", (x, w), out, transpose_a=False, transpose_b=True)
        return biased(g, y, bias)
