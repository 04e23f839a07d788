"""Where a long measurement has got to: a bar in a terminal, lines when asked for."""

import sys
from types import TracebackType
from typing import Any

import click

from mucudnn.report.words import DIRECTIONS, limit_text, speedup_text
from mucudnn.runtime.census import Surveyed
from mucudnn.runtime.comparison import Advance
from mucudnn.runtime.sweep import Progress
from mucudnn.suites import Layer

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
        """A layer begins or has been compared."""
        outcomes = None
        if at.result is not None:
            outcomes = ", ".join(
                f"{speedup_text(o.speedup)} within {limit_text(o.limit)}"
                for o in at.result.outcomes
            )
        self._at(at.layer, at.index, at.total, outcomes)

    def surveyed(self, at: Surveyed) -> None:
        """A layer begins or its algorithms are known."""
        counts = None
        if at.result is not None:
            batches = at.result.batches
            most = max(len(batch.algorithms) for batch in batches)
            counts = f"up to {most} algorithms at {len(batches)} sizes"
        self._at(at.layer, at.index, at.total, counts)

    def _at(self, layer: Layer, index: int, total: int, result: str | None) -> None:
        """Move the bar, or write a line once there is a result."""
        name = f"{layer.name} {DIRECTIONS[layer.problem.direction]}"
        self._layer = name
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task("", total=total)
            done = index + (result is not None)
            self._bar.update(self._task, completed=done, description=name)
        elif self._verbose and result is not None:
            click.echo(f"[{index + 1}/{total}] {name}: {result}", err=True)

    def measured(self, at: Progress) -> None:
        """One algorithm was timed at one size."""
        if self._task is not None:
            text = f"{self._layer}: {at.algo}({at.batch}) {at.done}/{at.total}"
            self._bar.update(self._task, description=text)
