"""Named strategies: wherever a name is accepted, a callable is accepted too."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

from mucudnn.plugins import PluginWarning, find_plugin, plugin_names

__all__ = ["ALL", "Strategies", "by_name", "name_of"]

ALL = "all"
"""What stands for every name of a table on the command line."""

_LAMBDA = "<lambda>"

F = TypeVar("F", bound=Callable[..., object])


def name_of(choice: object) -> str:
    """What to call a strategy: its name, a function's own, or that of its type."""
    if isinstance(choice, str):
        return choice
    while (inner := getattr(choice, "func", None)) is not None:  # functools.partial
        choice = inner
    return str(getattr(choice, "__name__", type(choice).__name__))


def by_name(kind: str, choices: Iterable[str | F]) -> Mapping[str, str | F]:
    """Strategies under what they are called, for tables that show several.

    Raises:
        ValueError: Two different ones are called the same.
    """
    found: dict[str, str | F] = {}
    for choice in choices:
        known = found.setdefault(name_of(choice), choice)
        if known is not choice and known != choice:
            raise ValueError(f"two of the {kind} are called {name_of(choice)!r}")
    return found


class Strategies(Generic[F]):
    """A table from names to functions of one signature.

    Args:
        kind: What they are, for messages.
        functions: Those that ship, under their own names.
        group: Entry points of installed distributions that join when asked for.
        reserved: Names that mean something else.
    """

    def __init__(
        self,
        kind: str,
        functions: Iterable[F] = (),
        *,
        group: str | None = None,
        reserved: Iterable[str] = (),
    ) -> None:
        self._kind = kind
        self._group = group
        self._reserved = frozenset(reserved)
        self._table: dict[str, F] = {}
        for fn in functions:
            self.register(fn)

    def register(self, fn: F, *, name: str | None = None) -> F:
        """Add `fn`, under its own name if no other is given. Usable as a decorator.

        Raises:
            TypeError: It is no function.
            ValueError: The name is taken, or is none.
        """
        if not callable(fn):
            raise TypeError(f"a {self._kind} is a function, got {fn!r}")
        name = name_of(fn) if name is None else name
        if name == _LAMBDA or not name or set(name) & set(", \t\n"):
            raise ValueError(
                f"a {self._kind} cannot be called {name!r}; give it another name: "
                "register(function, name=...)"
            )
        if name in self._table or name in self._reserved:
            raise ValueError(
                f"{self._kind} {name!r} is already registered; choose another name"
            )
        self._table[name] = fn
        return fn

    def resolve(self, choice: "str | F") -> F:
        """The function named `choice`, or `choice` itself if it is callable.

        A name that is not in the table is looked for among what is installed.

        Raises:
            ValueError: No strategy has that name; the message lists those that exist.
            TypeError: It is neither a name nor a function.
        """
        if not isinstance(choice, str):
            return self._checked(choice)
        known = self._table.get(choice)
        found = self._installed(choice) if known is None else known
        if found is None:
            raise self.unknown(choice)
        return found

    def _checked(self, choice: Any) -> F:
        if not callable(choice):
            raise TypeError(
                f"a {self._kind} is a name or a function, got {choice!r}; names are: "
                f"{', '.join(sorted(self.names))}"
            )
        return cast(F, choice)

    def unknown(self, name: str) -> ValueError:
        """What to raise where a name is not known."""
        valid = ", ".join(sorted({*self.names} - {name}))
        return ValueError(f"unknown {self._kind} {name!r}; choose one of: {valid}")

    @property
    def table(self) -> Mapping[str, F]:
        """Every registered strategy, by name; nothing that is only installed."""
        return MappingProxyType(dict(self._table))

    @property
    def names(self) -> tuple[str, ...]:
        """What `resolve` knows: registered strategies, then installed ones."""
        installed = () if self._group is None else plugin_names(self._group)
        return tuple(dict.fromkeys([*self._table, *installed]))

    def _installed(self, name: str) -> F | None:
        """The entry point of a name; None, and a warning, where it is of no use."""
        plugin = None if self._group is None else find_plugin(self._group, name)
        if plugin is None:
            return None
        try:
            found = plugin.load()
        except ImportError as e:
            warnings.warn(f"{self._kind} {e}", PluginWarning, stacklevel=3)
            return None
        if not callable(found):
            warnings.warn(
                f"{self._kind} {name!r} of the distribution {plugin.distribution} is "
                f"no function but {found!r}",
                PluginWarning,
                stacklevel=3,
            )
            return None
        return cast(F, found)
