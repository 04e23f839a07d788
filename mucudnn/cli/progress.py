"""Show progress of a long command: a bar in a terminal, lines elsewhere.

Lines let a log show that work continues. Work of less than ten seconds writes nothing.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from mucudnn.cli.remaining import Remaining, left_text

__all__ = ["ProgressLines", "Show", "Stage", "every_ten_seconds", "progress_display"]

_EVERY_S = 10.0
_END_S = 1.0  # a blocked error stream must not block the exit

Repeat = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Context manager that calls a function repeatedly."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Progress of the work when a part begins or ends.

    Attributes:
        text: Current part.
        done: Amount of work done.
        total: Total amount of work.
        title: Title ahead of a titled bar.
        result: Result of the part; printed by lines only.
        left_s: Remaining seconds of all work, if known; otherwise they are estimated
            from the parts so far.
    """

    text: str
    done: int
    total: int
    title: str = ""
    result: str = ""
    left_s: float | None = None

    def left(self, remaining: Remaining) -> str:
        """Return about how long the rest takes, in words; empty if unknown."""
        left_s = remaining.left_s() if self.left_s is None else self.left_s
        return left_text(left_s)


class Show:
    """Display of the progress, by a bar or by lines."""

    def __init__(self, display: Callable[[Stage], None]) -> None:
        self._display = display

    def __call__(
        self,
        text: str,
        done: int,
        total: int,
        *,
        title: str = "",
        result: str = "",
        left_s: float | None = None,
    ) -> None:
        """Report that a part begins or ends; see `Stage`."""
        self._display(Stage(text, done, total, title, result, left_s))


@contextmanager
def every_ten_seconds(tick: Callable[[], None]) -> Iterator[None]:
    """Call a function every ten seconds from a thread, as work may be one long call."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(_EVERY_S):
            tick()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_END_S)


@contextmanager
def progress_display(
    total: int,
    *,
    titled: bool = False,
    lines: bool = False,
    limit_s: float | None = None,
    repeat: Repeat = every_ten_seconds,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Show]:
    """Show progress on the error stream while the work in this context runs.

    In a terminal it is a bar that is removed at the end; elsewhere a line every ten
    seconds. Both estimate the remaining time once possible.

    Args:
        total: Amount of work as known at the start.
        titled: Whether the bar has a title.
        lines: Whether to write a line per result outside a terminal.
        limit_s: Time limit of the work.
        repeat: Schedule of the lines.
        clock: Clock of the lines, in seconds.
    """
    remaining = Remaining(clock, limit_s=limit_s)
    if sys.stderr.isatty():
        with _bar(total, remaining, titled=titled) as show:
            yield show
        return

    written = ProgressLines(sys.stderr, remaining, results=lines, clock=clock)
    with repeat(written.tick):
        yield Show(written.show)


@contextmanager
def _bar(total: int, remaining: Remaining, *, titled: bool) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    title_column = TextColumn("{task.fields[title]}", markup=False)
    text_column = TextColumn(
        "{task.fields[text]}",
        markup=False,
        table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
    )
    count = TextColumn("{task.completed:.0f}/{task.total:.0f}")
    bar = BarColumn(bar_width=24)
    progress = Progress(
        *((title_column, bar, count) if titled else (count, bar)),
        TimeElapsedColumn(),
        text_column,
        console=Console(stderr=True),
        transient=True,
        expand=True,  # a narrow terminal truncates the text, not the numbers
    )
    task = progress.add_task("", total=total, title="", text="")

    def move(stage: Stage) -> None:
        remaining.at(stage.done, stage.total, title=stage.title)
        progress.update(
            task,
            completed=stage.done,
            total=max(1, stage.total),  # an empty bar would be drawn full
            title=stage.title,
            text=", ".join(filter(None, (stage.left(remaining), stage.text))),
        )

    with progress:
        yield Show(move)


class ProgressLines:
    """Progress as lines; with `results`, every result is a line, too."""

    def __init__(
        self,
        stream: TextIO,
        remaining: Remaining,
        *,
        results: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._remaining = remaining
        self._results = results
        self._clock = clock
        self._start = clock()
        self._at = Stage("starting", 0, 0)
        self._just_written = False

    def show(self, stage: Stage) -> None:
        """Record the current stage, and write its result."""
        self._remaining.at(stage.done, stage.total, title=stage.title)
        self._at = stage
        if self._results and stage.result:
            self._just_written = True
            at = f"[{stage.done}/{stage.total}]"
            self._write(f"{at} {stage.text}: {stage.result}")

    def tick(self) -> None:
        """Write the current stage, unless a result was written since the last call."""
        if not self._just_written:
            seconds = round(self._clock() - self._start)
            minutes, seconds = divmod(seconds, 60)
            at = self._at
            count = f"{at.done} of {at.total}" if at.total > 1 else ""
            words = at.title, at.text, count, at.left(self._remaining)
            self._write(
                f"mucudnn: {minutes}:{seconds:02d} {', '.join(filter(None, words))}"
            )
        self._just_written = False

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):  # the stream may be closed
            self._stream.write(f"{line}\n")
            self._stream.flush()
