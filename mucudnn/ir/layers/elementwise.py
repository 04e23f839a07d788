"""One number from the same place of one or two tensors."""

from typing import TYPE_CHECKING

from mucudnn.arguments import a_number, one_of
from mucudnn.ir.tensor import INTEGERS, ITEMSIZE

if TYPE_CHECKING:
    from mucudnn.ir.builder import GraphBuilder

__all__ = [
    "add",
    "cast",
    "common_shape",
    "dropout",
    "gelu",
    "leaky_relu",
    "multiply",
    "relu",
    "scale",
    "sigmoid",
    "tanh",
]

_STEP = "step"
"""The input that counts steps, shared by all dropouts and by Adam."""


def relu(g: "GraphBuilder", x: str) -> str:
    """max(x, 0)."""
    return g.append("relu", (x,), g.shape(x))


def leaky_relu(g: "GraphBuilder", x: str, slope: float = 0.01) -> str:
    """x where it is positive, else slope * x; the slope must be positive."""
    if a_number("slope", slope) <= 0:
        raise ValueError(f"the slope must be positive, got {slope}")
    return g.append("leaky_relu", (x,), g.shape(x), slope=slope)


def gelu(g: "GraphBuilder", x: str) -> str:
    """x times the normal distribution function of x."""
    return g.append("gelu", (x,), g.shape(x))


def sigmoid(g: "GraphBuilder", x: str) -> str:
    """1 / (1 + exp(-x))."""
    return g.append("sigmoid", (x,), g.shape(x))


def tanh(g: "GraphBuilder", x: str) -> str:
    """Hyperbolic tangent."""
    return g.append("tanh", (x,), g.shape(x))


def dropout(g: "GraphBuilder", x: str, p: float = 0.5) -> str:
    """Zero each element with probability p and scale the rest by 1 / (1 - p).

    Which ones follows from the builder's seed, the layer and the step, so that a
    mask can be drawn again.
    """
    if not 0 <= a_number("p", p, finite=False) < 1:
        raise ValueError(f"p must be at least 0 and below 1, got {p}")
    if not g.training or p == 0:
        return x
    seed = g.seed + sum(node.op == "dropout" for node in g.nodes)
    if _STEP not in g.tensors:
        g.input(_STEP, (), "int64")
    return g.append("dropout", (x, _STEP), g.shape(x), p=p, seed=seed)


def add(g: "GraphBuilder", a: str, b: str) -> str:
    """a + b, of one shape."""
    return g.append("add", (a, b), common_shape(g, a, b))


def multiply(g: "GraphBuilder", a: str, b: str) -> str:
    """a * b, of one shape."""
    return g.append("multiply", (a, b), common_shape(g, a, b))


def scale(g: "GraphBuilder", x: str, factor: float) -> str:
    """factor * x."""
    a_number("factor", factor)
    return g.append("scale", (x,), g.shape(x), factor=factor)


def cast(g: "GraphBuilder", x: str, dtype: str) -> str:
    """The same numbers in another data type."""
    one_of("dtype", dtype, (*ITEMSIZE, *INTEGERS))
    return g.append("cast", (x,), g.shape(x), dtype=dtype)


def common_shape(g: "GraphBuilder", a: str, b: str) -> tuple[int, ...]:
    """The shape of both.

    Raises:
        ValueError: They differ.
    """
    if g.shape(a) != g.shape(b):
        raise ValueError(f"{a!r} has shape {g.shape(a)}, {b!r} has {g.shape(b)}")
    return g.shape(a)
