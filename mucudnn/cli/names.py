"""Options whose values are names in a table: of strategies or devices.

Tables are read when a value is parsed, completed, or listed in the help, so that
plugins and modules of `--import` are included.
"""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.completion import offered
from mucudnn.cli.options import Option, defaulting

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["StrategyOption", "Table", "names_of_all", "strategy", "table"]

Table = Callable[[], tuple[Iterable[str], Callable[[str], object]]]
"""() -> the names in a table, and a check that raises ValueError for other names."""


def table(module: str, name: str) -> Table:
    """Return a table of strategies whose module is imported on first use."""

    def found() -> tuple[Iterable[str], Callable[[str], object]]:
        registry = getattr(import_module(f"mucudnn.passes.{module}"), name)
        return registry.names, registry.resolve

    return found


def names_of_all(table: Table) -> tuple[str, ...]:
    """Return every usable name in a table; broken ones cause a warning."""
    names, check = table()
    found = []
    for name in names:
        try:
            check(name)
        except ValueError:
            continue
        found.append(name)
    return tuple(found)


class StrategyOption(click.Option):
    """An option that takes a name in a table.

    If `several` is given, it takes a comma list, or that word for the whole table.
    """

    def __init__(
        self,
        declarations: list[str],
        *,
        table: Table,
        several: str | None = None,
        **settings: Any,
    ) -> None:
        self._table = table
        self._several = several
        self._text = settings.get("help", "")
        metavar = "NAME" if several is None else "NAME,…"
        super().__init__(declarations, type=self._read, metavar=metavar, **settings)

    def _read(self, text: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(text, tuple):
            return text
        if self._several is None:
            self._check(text)
            return text
        words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
        for word in words:
            if word != self._several:
                self._check(word, f", or {self._several}")
        return words

    def _check(self, name: str, more: str = "") -> None:
        _, check = self._table()
        try:
            check(name)
        except ValueError as e:
            raise click.BadParameter(f"{e}{more}") from e

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> "list[CompletionItem]":
        """Complete with the current names."""
        names, _ = self._table()
        if self._several is None:
            return offered(names, incomplete)
        return offered((*names, self._several), incomplete, several=True)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the help with the current names."""
        names, _ = self._table()
        self.help = f"{self._text} One of: {', '.join(names)}."
        return super().get_help_record(ctx)


def strategy(
    flag: str,
    text: str,
    table: Table,
    *,
    name: str | None = None,
    default: Any = None,
    several: str | None = None,
) -> Option:
    """Declare an option whose value is a name in a table; see `StrategyOption`."""
    return click.option(
        *filter(None, (flag, name)),
        cls=StrategyOption,
        table=table,
        several=several,
        help=text,
        **defaulting(default),
    )
