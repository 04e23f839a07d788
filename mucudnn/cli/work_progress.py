"""What is being worked on, on the error stream of a terminal."""

import sys
from types import TracebackType
from typing import Any

__all__ = ["WorkDisplay"]


class WorkDisplay:
    """A bar that says what is being done; a context manager, silent without a tty."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "WorkDisplay":
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
            self._task = self._bar.add_task("", total=1)
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

    def show(self, what: str, done: int, total: int) -> None:
        """Something begins, after `done` of `total`."""
        if self._bar is not None:
            self._bar.update(
                self._task, description=what, completed=done, total=max(1, total)
            )
