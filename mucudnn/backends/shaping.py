"""Copies of a training step: which part of a tensor goes where, on every backend.

Each function lists, in order, what is copied into which part of the result: an array,
or a number that is then everywhere. How a copy is done is the backend's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

__all__ = ["SHAPING", "Copies"]

Copies = Callable[[Sequence[Any], Any, Mapping[str, Any]], Iterator[tuple[Any, Any]]]
"""(inputs, output, attributes) -> (source, target) of each copy."""


def _copy(
    inputs: Sequence[Any], y: Any, attrs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """All of a tensor, in the output's type."""
    yield inputs[0], y


def _fill(
    inputs: Sequence[Any], y: Any, attrs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """One value everywhere."""
    yield attrs["value"], y


def _concat(
    inputs: Sequence[Any], y: Any, attrs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Tensors, or some rows of each, one after the other along an axis.

    What is `before` the first and behind the last are zeros.
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


def _slice(
    inputs: Sequence[Any], y: Any, attrs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """The part between two corners."""
    pairs = zip(attrs["starts"], attrs["stops"], strict=True)
    yield inputs[0][tuple(slice(*pair) for pair in pairs)], y


def _pad(
    inputs: Sequence[Any], y: Any, attrs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Zeros around a tensor."""
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


SHAPING: Mapping[str, Copies] = MappingProxyType(
    {
        "cast": _copy,
        "concat": _concat,
        "fill": _fill,
        "identity": _copy,
        "pad": _pad,
        "slice": _slice,
    }
)
"""Operation -> the copies it is made of."""
