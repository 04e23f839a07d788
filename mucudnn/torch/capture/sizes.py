"""Graphs whose sizes are symbols: compiled once for every combination of sizes.

`torch.compile` makes a size a symbol when it meets a second one, so that it need not
trace the model again. A plan is of certain sizes. So the traced graph is kept, and what
is planned is the same graph at the sizes of each call.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mucudnn.errors import UnsupportedError
from mucudnn.torch.storages import storage_of

__all__ = ["BySize", "has_symbols"]

_MOST = 64
"""Kinds of one graph that are planned: whoever has more has a number in its inputs that
counts."""


def has_symbols(inputs: Sequence[Any]) -> bool:
    """Whether a size, or a number, among a graph's inputs is a symbol."""
    return any(_is_symbolic(value) for value in inputs)


class BySize:
    """A graph that is compiled when sizes are first seen.

    Args:
        inputs: Examples, of which some sizes are symbols.
        compile_for: Compiles the graph for inputs as they are, given words about sizes.
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        compile_for: Callable[[Sequence[Any], str], Callable[..., Any]],
    ) -> None:
        self._places = [i for i, value in enumerate(inputs) if _is_symbolic(value)]
        self._compile_for = compile_for
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def __call__(self, *given: Any) -> Any:
        """Run the graph.

        Raises:
            UnsupportedError: There are too many kinds of inputs to plan for each.
        """
        key = _layouts([given[i] for i in self._places])
        run = self._compiled.get(key)
        if run is None:
            with self._lock:
                run = self._compiled.get(key) or self._new(key, given)
        return run(*given)

    def _new(self, key: Any, given: Sequence[Any]) -> Callable[..., Any]:
        if len(self._compiled) >= _MOST:
            raise UnsupportedError(
                f"this graph has been planned for {_MOST} kinds of inputs, and now "
                f"there are {_said(given, self._places)}; pad batches to a few sizes, "
                "and give numbers that change from call to call as tensors"
            )
        run = self._compile_for(given, _said(given, self._places))
        self._compiled[key] = run
        return run


def _said(given: Sequence[Any], places: Sequence[int]) -> str:
    """Sizes and numbers, once each."""
    values: Mapping[str, None] = dict.fromkeys(
        "x".join(map(str, v.shape)) if isinstance(v, torch.Tensor) else str(v)
        for v in map(given.__getitem__, places)
    )
    return ", ".join(values)


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        numbers = (*value.shape, *value.stride())
        return any(isinstance(number, torch.SymInt) for number in numbers)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _layouts(values: Sequence[Any]) -> Any:
    """Equal for inputs that lie alike, and share storages alike."""
    first: dict[int, int] = {}
    return tuple(
        [
            (
                value.shape,
                value.stride(),
                first.setdefault(storage_of(value), i),
            )
            if isinstance(value, torch.Tensor)
            else value
            for i, value in enumerate(values)
        ]
    )
