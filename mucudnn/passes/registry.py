"""Registries of named strategies; wherever a name is accepted, so is a callable."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar, cast

from mucudnn.plugins import PluginWarning, find_plugin, plugin_names

ALL = "all"
"""Command-line word for all names of a registry."""

_LAMBDA = "<lambda>"

F = TypeVar("F", bound=Callable[..., object])


def name_of(choice: object) -> str:
    """Return the name of a strategy: itself, its function's name, or its type's."""
    if isinstance(choice, str):
        return choice
    while (inner := getattr(choice, "func", None)) is not None:  # functools.partial
        choice = inner
    return str(getattr(choice, "__name__", type(choice).__name__))


def by_name(kind: str, choices: Iterable[str | F]) -> Mapping[str, str | F]:
    """Return strategies by name.

    Raises:
        ValueError: Two different strategies have the same name.
    """
    found: dict[str, str | F] = {}
    for choice in choices:
        known = found.setdefault(name_of(choice), choice)
        if known is not choice and known != choice:
            raise ValueError(f"two of the {kind} are called {name_of(choice)!r}")
    return found


class Strategies(Generic[F]):
    """A registry of functions of one signature, by name.

    Args:
        kind: What the functions are called in messages.
        functions: Built-in functions, under their own names.
        group: Entry point group of plugins, loaded on demand.
        reserved: Names that cannot be registered.
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
        """Register `fn`, by default under its own name; usable as a decorator.

        Raises:
            TypeError: `fn` is not callable.
            ValueError: The name is taken or invalid.
        """
        if not callable(fn):
            raise TypeError(f"a {self._kind} must be a function, got {fn!r}")
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
        """Return the function named `choice`, or `choice` itself if it is callable.

        A name that is not registered is looked up among the installed plugins.

        Raises:
            ValueError: The name is unknown; the message lists the valid ones.
            TypeError: `choice` is neither a name nor a function.
        """
        if not isinstance(choice, str):
            if not callable(choice):
                raise TypeError(
                    f"a {self._kind} must be a name or a function, got {choice!r}; "
                    f"names are: {', '.join(sorted(self.names))}"
                )
            return choice
        known = self._table.get(choice)
        found = self._installed(choice) if known is None else known
        if found is None:
            valid = ", ".join(sorted({*self.names} - {choice}))
            raise ValueError(f"unknown {self._kind} {choice!r}; choose one of: {valid}")
        return found

    @property
    def table(self) -> Mapping[str, F]:
        """Registered strategies by name, without plugins."""
        return MappingProxyType(dict(self._table))

    @property
    def names(self) -> tuple[str, ...]:
        """Names that `resolve` accepts: registered strategies, then plugins."""
        installed = () if self._group is None else plugin_names(self._group)
        return tuple(dict.fromkeys([*self._table, *installed]))

    def _installed(self, name: str) -> F | None:
        """Return the plugin of a name; None, with a warning if it cannot be used."""
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
