"""What a shell offers for a value that is half typed.

Tables are looked at when the key is pressed, so what is installed, or imported by what
is on the line already, is offered as well.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["Complete", "completing", "completing_files", "offered"]

Complete = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]
"""(context, parameter, what is typed) -> what it may become."""


def completing(
    names: Callable[[click.Context], Iterable[str]],
    *,
    several: bool = False,
    files: bool = False,
) -> Complete:
    """One of some names.

    Args:
        names: What there is, where the line is as far as a context tells.
        several: Whether it is a comma list: then its last word is completed.
        files: Whether it may be a file as well.
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
    """A file: the shell knows which there are."""
    del ctx, parameter
    return _file(typed)


def offered(
    names: Iterable[str], typed: str, *, several: bool = False
) -> "list[CompletionItem]":
    """The names that begin as typed, behind the words of a list that are there."""
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
