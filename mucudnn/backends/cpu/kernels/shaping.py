"""Copies: whole tensors, parts of them, and constants."""

from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import BLOCK_BYTES, KernelCall, Run

__all__ = ["OPERATIONS"]


def copy(call: KernelCall) -> None:
    """A copy, in the output's type."""
    _copy(call, call.inputs[0], call.outputs[0])


def fill(call: KernelCall) -> None:
    """One value everywhere."""
    _copy(call, np.asarray(call.attrs["value"], call.outputs[0].dtype), call.outputs[0])


def concat(call: KernelCall) -> None:
    """Tensors, or some rows of each, one after the other along an axis.

    What is `before` the first and behind the last are zeros.
    """
    axis, (y,) = call.attrs.get("axis", 1), call.outputs
    parts = call.attrs.get("parts") or [(0, x.shape[axis]) for x in call.inputs]
    first = start = call.attrs.get("before", 0)
    for x, part in zip(call.inputs, parts, strict=True):
        stop = start + part[1] - part[0]
        _copy(call, x[_along(axis, *part)], y[_along(axis, start, stop)])
        start = stop
    for around in ((0, first), (start, y.shape[axis])):
        if around[0] < around[1]:
            _copy(call, np.zeros((), y.dtype), y[_along(axis, *around)])


def slice_(call: KernelCall) -> None:
    """The part between two corners."""
    pairs = zip(call.attrs["starts"], call.attrs["stops"], strict=True)
    _copy(call, call.inputs[0][tuple(slice(*pair) for pair in pairs)], call.outputs[0])


def pad(call: KernelCall) -> None:
    """Zeros around a tensor."""
    (x,), (y,) = call.inputs, call.outputs
    zero = np.zeros((), y.dtype)
    interior = []
    for axis, before in enumerate(call.attrs["before"]):
        stop = before + x.shape[axis]
        interior.append(slice(before, stop))
        _copy(call, zero, y[_along(axis, 0, before)])
        _copy(call, zero, y[_along(axis, stop, y.shape[axis])])
    _copy(call, x, y[tuple(interior)])


def _along(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(start, stop))


def _copy(call: KernelCall, source: Any, target: Any) -> None:
    if not target.ndim:
        target[...] = source
        return
    source = np.broadcast_to(source, target.shape)

    def tile(part: tuple[slice, ...]) -> None:
        target[part] = source[part]

    call.tiles_of(target, tile, 2 * BLOCK_BYTES)


OPERATIONS: dict[str, Run] = {
    "cast": copy,
    "concat": concat,
    "fill": fill,
    "identity": copy,
    "pad": pad,
    "slice": slice_,
}
