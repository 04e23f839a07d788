"""Where a long measurement has got to: a bar in a terminal, lines when asked for."""

import sys
from types import TracebackType
from typing import Any

import click

from mucudnn.report.words import DIRECTIONS, limit_text, speedup_text
from mucudnn.runtime.comparison import Advance
from mucudnn.runtime.sweep import Progress

__all__ = ["Display"]


class Display:
    """Shows progress on the error stream; a context manager.

    Args:
        verbose: Without a terminal, write a line a layer.
    """

    def __init__(self, *, verbose: bool) -> None:
        self._verbose = verbose
        self._bar: Any = None
        self._task: Any = None
        self._layer = ""

    def __enter__(self) -> "Display":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                TextColumn("{task.description}", markup=False),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, at: Advance) -> None:
        """A layer begins or is done."""
        name = f"{at.layer.name} {DIRECTIONS[at.layer.problem.direction]}"
        self._layer = name
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task("", total=at.total)
            done = at.index + (at.result is not None)
            self._bar.update(self._task, completed=done, description=name)
        elif self._verbose and at.result is not None:
            outcomes = ", ".join(
                f"{speedup_text(o.speedup)} within {limit_text(o.limit)}"
                for o in at.result.outcomes
            )
            click.echo(f"[{at.index + 1}/{at.total}] {name}: {outcomes}", err=True)

    def measured(self, at: Progress) -> None:
        """One algorithm was timed at one size."""
        if self._task is not None:
            text = f"{self._layer}: {at.algo}({at.batch}) {at.done}/{at.total}"
            self._bar.update(self._task, description=text)
