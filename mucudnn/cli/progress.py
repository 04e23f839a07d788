"""How far a long command has got: a bar in a terminal, elsewhere some lines."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from mucudnn.cli.progress_lines import ProgressLines, Repeat, every_ten_seconds

__all__ = ["Show", "progress_display"]


class Show(Protocol):
    """Says where the work is."""

    def __call__(
        self, text: str, done: int, total: int, *, title: str = "", result: str = ""
    ) -> None:
        """Something begins or is over.

        Args:
            text: What it is.
            done: How much of the work is over.
            total: How much there is.
            title: What it is part of, ahead of a titled bar.
            result: What came of it; only lines say so.
        """
        ...


@contextmanager
def progress_display(
    total: int,
    *,
    titled: bool = False,
    lines: bool = False,
    repeat: Repeat = every_ten_seconds,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Show]:
    """Show progress on the error stream while the work in this context is done.

    In a terminal it is a bar of which nothing is left at the end, however that comes;
    elsewhere a line every ten seconds.

    Args:
        total: How much work there is, as far as is known at the start.
        titled: Whether the bar has a title.
        lines: Without a terminal, write also a line a result.
        repeat: When lines are written.
        clock: Seconds, for lines.
    """
    if sys.stderr.isatty():
        with _bar(total, titled=titled) as show:
            yield show
        return

    written = ProgressLines(sys.stderr, results=lines, clock=clock)
    with repeat(written.tick):
        yield written.show


@contextmanager
def _bar(total: int, *, titled: bool) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    title_column, text_column = (
        TextColumn(f"{{task.fields[{name}]}}", markup=False)
        for name in ("title", "text")
    )
    count = TextColumn("{task.completed:.0f}/{task.total:.0f}")
    bar = BarColumn(bar_width=24)
    progress = Progress(
        *((title_column, bar, count) if titled else (count, bar)),
        TimeElapsedColumn(),
        text_column,
        console=Console(stderr=True),
        transient=True,
    )
    task = progress.add_task("", total=total, title="", text="")

    def move(
        text: str, done: int, total: int, *, title: str = "", result: str = ""
    ) -> None:
        most = max(1, total)  # a bar of nothing is drawn full
        progress.update(task, completed=done, total=most, title=title, text=text)

    with progress:
        yield move
