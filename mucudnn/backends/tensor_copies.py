"""Copies of a training step: source and target of each, for all backends.

Each function yields, in order, pairs of a source (an array, or a number to fill with)
and the target, a part of the result. The backend does the copying.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_Inputs = Sequence[Any]
_Attrs = Mapping[str, Any]
_Pairs = Iterator[tuple[Any, Any]]
Copies = Callable[[_Inputs, Any, _Attrs], _Pairs]
"""(inputs, output, attributes) -> (source, target) of each copy."""


def _concat(inputs: _Inputs, y: Any, attrs: _Attrs) -> _Pairs:
    """Concatenate tensors, or ranges of them, along an axis.

    The `before` first positions and those behind the last tensor are zeros.
    """
    axis = attrs.get("axis", 1)
    parts = attrs.get("parts") or [(0, x.shape[axis]) for x in inputs]
    first = start = attrs.get("before", 0)
    for x, part in zip(inputs, parts, strict=True):
        stop = start + part[1] - part[0]
        yield x[_along(axis, *part)], y[_along(axis, start, stop)]
        start = stop
    for around in ((0, first), (start, y.shape[axis])):
        if around[0] < around[1]:
            yield 0, y[_along(axis, *around)]


def _slice(inputs: _Inputs, y: Any, attrs: _Attrs) -> _Pairs:
    pairs = zip(attrs["starts"], attrs["stops"], strict=True)
    yield inputs[0][tuple(slice(*pair) for pair in pairs)], y


def _pad(inputs: _Inputs, y: Any, attrs: _Attrs) -> _Pairs:
    (x,) = inputs
    interior = []
    for axis, before in enumerate(attrs["before"]):
        stop = before + x.shape[axis]
        interior.append(slice(before, stop))
        yield 0, y[_along(axis, 0, before)]
        yield 0, y[_along(axis, stop, y.shape[axis])]
    yield x, y[tuple(interior)]


def _along(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(start, stop))


SHAPING: Mapping[str, Copies] = {
    "cast": lambda inputs, y, attrs: iter([(inputs[0], y)]),
    "concat": _concat,
    "fill": lambda inputs, y, attrs: iter([(attrs["value"], y)]),
    "identity": lambda inputs, y, attrs: iter([(inputs[0], y)]),
    "pad": _pad,
    "slice": _slice,
}
"""Operation name to its copies."""
