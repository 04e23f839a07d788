"""Normalization layers."""

from typing import TYPE_CHECKING

from mucudnn.arguments import a_number, an_integer
from mucudnn.ir.initializers import Constant, Initializer
from mucudnn.ir.shapes import channels as channels_of

if TYPE_CHECKING:
    from mucudnn.ir.builder import GraphBuilder

__all__ = ["batch_norm", "group_norm", "layer_norm", "lrn"]


def batch_norm(
    g: "GraphBuilder",
    x: str,
    *,
    eps: float = 1e-5,
    momentum: float = 0.1,
    scale: Initializer | None = None,
    name: str = "batch_norm",
) -> str:
    """Normalize each channel over the batch, or by running statistics."""
    shape, channels = g.shape(x), (channels_of(x, g.shape(x)),)
    a_number("eps", eps, 0)
    a_number("momentum", momentum, 0, 1)
    with g.scope(name):
        inputs = (
            x,
            g.parameter("weight", channels, Constant(1.0) if scale is None else scale),
            g.parameter("bias", channels, Constant(0.0)),
            g.state("running_mean", channels, Constant(0.0)),
            g.state("running_var", channels, Constant(1.0)),
        )
        if not g.training:
            return g.append("batch_norm_eval", inputs, shape, eps=eps)
        dtype = g.spec(inputs[1]).dtype
        return g.append(
            "batch_norm",
            inputs,
            shape,
            (("mean", channels, dtype), ("inv_std", channels, dtype)),
            mutates=inputs[3:],
            eps=eps,
            momentum=momentum,
            update=True,
        )


def group_norm(
    g: "GraphBuilder",
    x: str,
    groups: int,
    *,
    eps: float = 1e-5,
    name: str = "group_norm",
) -> str:
    """Normalize each sample over groups of channels; scale each channel."""
    channels = channels_of(x, g.shape(x))
    if channels % an_integer("groups", groups, least=1):
        raise ValueError(f"{channels} channels do not divide into {groups} groups")
    with g.scope(name):
        return _append_group_norm(g, x, (channels,), groups, eps, per_element=False)


def layer_norm(
    g: "GraphBuilder", x: str, *, eps: float = 1e-5, name: str = "layer_norm"
) -> str:
    """Normalize each sample over all its elements; scale each element."""
    with g.scope(name):
        return _append_group_norm(g, x, g.shape(x)[1:], 1, eps, per_element=True)


def lrn(
    g: "GraphBuilder",
    x: str,
    size: int = 5,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 1.0,
) -> str:
    """Apply local response normalization across channels (AlexNet, sec. 3.3)."""
    an_integer("size", size, least=1)
    for label, value in (("alpha", alpha), ("beta", beta), ("k", k)):
        a_number(label, value, 0)
    return g.append("lrn", (x,), g.shape(x), size=size, alpha=alpha, beta=beta, k=k)


def _append_group_norm(
    g: "GraphBuilder",
    x: str,
    affine: tuple[int, ...],
    groups: int,
    eps: float,
    *,
    per_element: bool,
) -> str:
    a_number("eps", eps, 0)
    shape = g.shape(x)
    weight = g.parameter("weight", affine, Constant(1.0))
    bias = g.parameter("bias", affine, Constant(0.0))
    saved, dtype = (shape[0], groups), g.spec(weight).dtype
    return g.append(
        "group_norm",
        (x, weight, bias),
        shape,
        (("mean", saved, dtype), ("inv_std", saved, dtype)),
        groups=groups,
        eps=eps,
        per_element=per_element,
    )
