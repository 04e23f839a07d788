"""Layers that concatenate, slice, pad, reshape and repeat."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mucudnn.arguments import integers
from mucudnn.ir.shapes import Ints, channels, per_axis

if TYPE_CHECKING:
    from mucudnn.ir.builder import GraphBuilder

__all__ = [
    "concat",
    "flatten",
    "pad",
    "reshape",
    "slice",
    "upsample_bilinear",
    "upsample_nearest",
]


def concat(g: "GraphBuilder", tensors: Sequence[str]) -> str:
    """Concatenate tensors along their channels."""
    if isinstance(tensors, str) or not isinstance(tensors, Sequence) or not tensors:
        raise TypeError(f"concat takes a list of names of tensors, got {tensors!r}")
    for name in tensors:
        channels(name, g.shape(name))
    shapes = [g.shape(t) for t in tensors]
    for shape in shapes[1:]:
        if (shape[0], *shape[2:]) != (shapes[0][0], *shapes[0][2:]):
            raise ValueError(f"cannot concatenate {shapes} along channels")
    depth = sum(shape[1] for shape in shapes)
    out = (shapes[0][0], depth, *shapes[0][2:])
    return g.append("concat", tuple(tensors), out, axis=1)


def slice(
    g: "GraphBuilder", x: str, starts: Sequence[int], stops: Sequence[int]
) -> str:
    """Return the box from `starts` to `stops` (exclusive), over all axes."""
    shape = g.shape(x)
    starts, stops = integers("starts", starts), integers("stops", stops)
    if not len(starts) == len(stops) == len(shape) or any(
        not 0 <= a < b <= n for a, b, n in zip(starts, stops, shape, strict=True)
    ):
        raise ValueError(f"no box from {starts} to {stops} in shape {shape}")
    out = tuple(b - a for a, b in zip(starts, stops, strict=True))
    return g.append("slice", (x,), out, starts=tuple(starts), stops=tuple(stops))


def pad(g: "GraphBuilder", x: str, before: Sequence[int], after: Sequence[int]) -> str:
    """Add zeros at both ends of all axes."""
    shape = g.shape(x)
    before, after = integers("before", before), integers("after", after)
    if not len(before) == len(after) == len(shape) or min(*before, *after, 0) < 0:
        raise ValueError(f"cannot pad {shape} by {before} and {after}")
    out = tuple(a + n + b for a, n, b in zip(before, shape, after, strict=True))
    return g.append("pad", (x,), out, before=tuple(before), after=tuple(after))


def reshape(g: "GraphBuilder", x: str, shape: Sequence[int]) -> str:
    """View the same bytes in another shape."""
    shape = integers("shape", shape, least=1)
    if math.prod(shape) != math.prod(g.shape(x)):
        raise ValueError(f"{g.shape(x)} cannot be seen as {tuple(shape)}")
    return g.append("reshape", (x,), tuple(shape), alias=x)


def flatten(g: "GraphBuilder", x: str) -> str:
    """View (N, …) as (N, F)."""
    shape = g.shape(x)
    return reshape(g, x, (shape[0], math.prod(shape[1:])))


def upsample_nearest(g: "GraphBuilder", x: str, scale: Ints = 2) -> str:
    """Repeat every pixel `scale` times along each axis."""
    return _upsample(g, "upsample_nearest", x, scale)


def upsample_bilinear(g: "GraphBuilder", x: str, scale: Ints = 2) -> str:
    """Interpolate linearly along every axis; corners are not aligned."""
    return _upsample(g, "upsample_bilinear", x, scale)


def _upsample(g: "GraphBuilder", op: str, x: str, scale: Ints) -> str:
    shape = g.shape(x)
    scales = per_axis("scale", scale, len(shape) - 2, 1)
    spatial = (n * s for n, s in zip(shape[2:], scales, strict=True))
    return g.append(op, (x,), (*shape[:2], *spatial), scale=scales)
