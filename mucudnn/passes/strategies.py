"""Named strategies: wherever a name is accepted, a callable is accepted too."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

__all__ = ["Strategies"]

F = TypeVar("F", bound=Callable[..., object])


class Strategies(Generic[F]):
    """A table from names to functions of one signature."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._table: dict[str, F] = {}

    def register(self, fn: F) -> F:
        """Add `fn` under its own name. Usable as a decorator."""
        name = getattr(fn, "__name__", repr(fn))
        if name in self._table:
            raise ValueError(f"{self._kind} {name!r} is already registered")
        self._table[name] = fn
        return fn

    def resolve(self, choice: "str | F") -> F:
        """The function named `choice`, or `choice` itself if it is callable.

        Raises:
            ValueError: No strategy has that name; the message lists those that exist.
        """
        if not isinstance(choice, str):
            return choice
        try:
            return self._table[choice]
        except KeyError:
            valid = ", ".join(sorted(self._table))
            raise ValueError(
                f"unknown {self._kind} {choice!r}; choose one of: {valid}"
            ) from None

    @property
    def table(self) -> Mapping[str, F]:
        """Every registered strategy, by name."""
        return dict(self._table)
