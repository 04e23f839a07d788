"""Values of Python's that a step was captured with: seen when they are others.

A loss that is annealed by a number, a module whose rate a schedule changes, a loss that
reads a global tensor: a captured step has what there was when it was captured. Looked
at are numbers, flags and texts among the attributes of modules and the free variables
of the loss function and of functions that it calls, and which tensors the latter are.
What is inside of containers and other objects is not.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch

__all__ = ["PlainValues"]

_PLAIN = (bool, int, float, complex, str)


class PlainValues:
    """Where such values are.

    Args:
        modules: Whose attributes are looked at.
        function: The loss function.
    """

    def __init__(
        self, modules: Sequence[torch.nn.Module], function: Callable[..., Any]
    ) -> None:
        self._places: list[tuple[Mapping[str, Any], str]] = [
            (held, key)
            for held in map(vars, modules)
            for key, value in held.items()
            if key != "training" and key[:1] != "_" and isinstance(value, _PLAIN)
        ]
        self._cells: list[tuple[str, Any]] = []
        self._globals: list[tuple[Mapping[str, Any], str]] = []
        if not isinstance(function, torch.nn.Module):
            for found in _functions(function, set()):
                self._look_at(found)

    def now(self) -> tuple[Any, ...]:
        """The values; of tensors, which ones they are."""
        return (
            *[
                value if type(value := held.get(key)) in _PLAIN else _which(value)
                for held, key in (*self._places, *self._globals)
            ],
            *[_which(_content(cell)) for _, cell in self._cells],
        )

    def changed(self, one: Sequence[Any], other: Sequence[Any]) -> list[str]:
        """Names of those that are not equal."""
        places = (*self._places, *self._globals)
        names = [*[key for _, key in places], *[name for name, _ in self._cells]]
        rows = zip(names, one, other, strict=True)
        return [name for name, a, b in rows if a is not b and a != b]

    def _look_at(self, function: FunctionType | Mapping[str, Any]) -> None:
        if not isinstance(function, FunctionType):
            held = function
            self._places += [(held, k) for k in held if isinstance(held[k], _PLAIN)]
            return
        free = zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        )
        self._cells += [(n, c) for n, c in free if _looked_at(_content(c))]
        around = function.__globals__
        names = [n for n in function.__code__.co_names if _looked_at(around.get(n))]
        self._globals += [(around, name) for name in names]


def _functions(
    function: Any, seen: set[int]
) -> Iterator[FunctionType | Mapping[str, Any]]:
    """The user's functions that one may call, itself first, and their objects."""
    if id(function) in seen or isinstance(function, torch.nn.Module):
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        yield from _functions(function.func, seen)
    elif isinstance(function, MethodType):
        yield from _functions(function.__func__, seen)
        if not isinstance(function.__self__, torch.nn.Module | type):
            yield getattr(function.__self__, "__dict__", {})
    elif isinstance(function, FunctionType):
        if function.__module__ and function.__module__.partition(".")[0] == "torch":
            return
        yield function
        around = [_content(cell) for cell in function.__closure__ or ()]
        names = function.__code__.co_names
        around += [function.__globals__.get(name) for name in names]
        for value in around:
            if isinstance(value, FunctionType | MethodType | functools.partial):
                yield from _functions(value, seen)
    elif not isinstance(function, type):
        called = vars(type(function)).get("__call__")
        if isinstance(called, FunctionType):
            yield from _functions(MethodType(called, function), seen)


def _content(cell: Any) -> Any:
    """What a variable is; None if it is not there yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _looked_at(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, torch.Tensor))


def _which(value: Any) -> Any:
    """What stands for a value: itself, which tensor it is, or of what type."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor, id(value)
    return value if isinstance(value, _PLAIN) else type(value)
