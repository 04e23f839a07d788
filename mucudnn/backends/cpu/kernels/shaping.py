"""Copies: whole tensors, parts of them, and constants."""

from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import (
    BLOCK_BYTES,
    Attrs,
    Inputs,
    Outputs,
    Run,
    share,
    tiles,
)
from mucudnn.backends.cpu.threads import Workers

__all__ = ["OPERATIONS", "cast", "concat", "fill", "identity", "pad", "slice_"]


def identity(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """A copy."""
    _copy(workers, inputs[0], outputs[0])


def cast(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """A copy in the output's type."""
    _copy(workers, inputs[0], outputs[0])


def fill(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """One value everywhere."""
    _copy(workers, np.asarray(attrs["value"], outputs[0].dtype), outputs[0])


def concat(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """Tensors one after the other along an axis."""
    axis = attrs.get("axis", 1)
    start = 0
    for x in inputs:
        stop = start + x.shape[axis]
        _copy(workers, x, outputs[0][_along(axis, start, stop)])
        start = stop


def slice_(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """The part between two corners."""
    pairs = zip(attrs["starts"], attrs["stops"], strict=True)
    _copy(workers, inputs[0][tuple(slice(*pair) for pair in pairs)], outputs[0])


def pad(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """Zeros around a tensor."""
    (x,), (y,) = inputs, outputs
    zero = np.zeros((), y.dtype)
    interior = []
    for axis, before in enumerate(attrs["before"]):
        stop = before + x.shape[axis]
        interior.append(slice(before, stop))
        _copy(workers, zero, y[_along(axis, 0, before)])
        _copy(workers, zero, y[_along(axis, stop, y.shape[axis])])
    _copy(workers, x, y[tuple(interior)])


def _along(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(start, stop))


def _copy(workers: Workers, source: Any, target: Any) -> None:
    if not target.ndim:
        target[...] = source
        return
    source = np.broadcast_to(source, target.shape)
    parts = tiles(target.shape, 2 * BLOCK_BYTES // target.itemsize)

    def tile(part: tuple[slice, ...]) -> None:
        target[part] = source[part]

    share(workers, parts, tile)


OPERATIONS: dict[str, Run] = {
    "cast": cast,
    "concat": concat,
    "fill": fill,
    "identity": identity,
    "pad": pad,
    "slice": slice_,
}
