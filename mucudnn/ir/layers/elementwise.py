"""Elementwise layers of one or two tensors."""

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
"""Input tensor that counts steps, shared by all dropouts and by Adam."""


def relu(g: "GraphBuilder", x: str) -> str:
    """Compute max(x, 0)."""
    return g.append("relu", (x,), g.shape(x))


def leaky_relu(g: "GraphBuilder", x: str, slope: float = 0.01) -> str:
    """Compute x where positive, else slope * x; the slope must be positive."""
    if a_number("slope", slope) <= 0:
        raise ValueError(f"the slope must be positive, got {slope}")
    return g.append("leaky_relu", (x,), g.shape(x), slope=slope)


def gelu(g: "GraphBuilder", x: str) -> str:
    """Compute x times the normal distribution function of x."""
    return g.append("gelu", (x,), g.shape(x))


def sigmoid(g: "GraphBuilder", x: str) -> str:
    """Compute 1 / (1 + exp(-x))."""
    return g.append("sigmoid", (x,), g.shape(x))


def tanh(g: "GraphBuilder", x: str) -> str:
    """Compute the hyperbolic tangent."""
    return g.append("tanh", (x,), g.shape(x))


def dropout(g: "GraphBuilder", x: str, p: float = 0.5) -> str:
    """Zero each element with probability p and scale the rest by 1 / (1 - p).

    The mask is a function of the builder's seed, the layer and the step, so that it
    can be recomputed.
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
    """Compute a + b for tensors of one shape."""
    return g.append("add", (a, b), common_shape(g, a, b))


def multiply(g: "GraphBuilder", a: str, b: str) -> str:
    """Compute a * b for tensors of one shape."""
    return g.append("multiply", (a, b), common_shape(g, a, b))


def scale(g: "GraphBuilder", x: str, factor: float) -> str:
    """Compute factor * x."""
    a_number("factor", factor)
    return g.append("scale", (x,), g.shape(x), factor=factor)


def cast(g: "GraphBuilder", x: str, dtype: str) -> str:
    """Convert to another data type."""
    one_of("dtype", dtype, (*ITEMSIZE, *INTEGERS))
    return g.append("cast", (x,), g.shape(x), dtype=dtype)


def common_shape(g: "GraphBuilder", a: str, b: str) -> tuple[int, ...]:
    """Return the shape of two tensors; differing shapes raise a `ValueError`."""
    if g.shape(a) != g.shape(b):
        raise ValueError(f"{a!r} has shape {g.shape(a)}, {b!r} has {g.shape(b)}")
    return g.shape(a)
