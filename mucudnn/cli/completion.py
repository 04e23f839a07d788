"""Complete half-typed values in a shell.

Tables are read when the key is pressed, so that installed plugins, and modules that the
line imports, are included.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["Complete", "completing", "completing_files", "offered"]

Complete = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]
"""(context, parameter, typed text) -> completions."""


def completing(
    names: Callable[[click.Context], Iterable[str]],
    *,
    several: bool = False,
    files: bool = False,
) -> Complete:
    """Return a completion for one of some names, which may depend on the line so far.

    With `several`, the value is a comma list, whose last word is completed; with
    `files`, it may also be a file.
    """

    def complete(
        ctx: click.Context, parameter: click.Parameter, typed: str
    ) -> "list[CompletionItem]":
        del parameter
        found = offered(names(ctx), typed, several=several)
        return found or (_file(typed) if files else [])

    return complete


def completing_files(
    ctx: click.Context, parameter: click.Parameter, typed: str
) -> "list[CompletionItem]":
    """Complete a file name by the shell's own means."""
    del ctx, parameter
    return _file(typed)


def offered(
    names: Iterable[str], typed: str, *, several: bool = False
) -> "list[CompletionItem]":
    """Return names that begin as typed and are not in the list yet."""
    from click.shell_completion import CompletionItem

    before, comma, word = typed.rpartition(",") if several else ("", "", typed)
    given = before.split(",")
    return [
        CompletionItem(f"{before}{comma}{name}")
        for name in dict.fromkeys(names)
        if name.startswith(word) and name not in given
    ]


def _file(typed: str) -> "list[CompletionItem]":
    from click.shell_completion import CompletionItem

    return [CompletionItem(typed, type="file")]
