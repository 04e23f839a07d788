"""How far a long command has got: a bar in a terminal, lines elsewhere.

Whoever reads a log later, or follows it, sees that the work goes on and at what. Work
that takes less than ten seconds writes nothing.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from mucudnn.cli.remaining import Remaining, left_text

__all__ = [
    "ProgressLines",
    "Show",
    "Stage",
    "every_ten_seconds",
    "progress_display",
]

_EVERY_S = 10.0
_END_S = 1.0  # whoever reads the error stream may have stopped

Repeat = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Calls a function again and again within its context."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the work is: something begins or is over.

    Attributes:
        text: What it is.
        done: How much of the work is over.
        total: How much there is.
        title: What it is part of, ahead of a titled bar.
        result: What came of it; only lines say so.
        left_s: Seconds that all of the work will still take, where whoever tells knows;
            otherwise it is estimated from what the parts took.
    """

    text: str
    done: int
    total: int
    title: str = ""
    result: str = ""
    left_s: float | None = None

    def left(self, remaining: Remaining) -> str:
        """About how long the rest takes, in words; empty where nobody knows."""
        left_s = remaining.left_s() if self.left_s is None else self.left_s
        return left_text(left_s)


class Show:
    """Says where the work is, by a bar or by lines."""

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
        """Something begins or is over; see `Stage`."""
        self._display(Stage(text, done, total, title, result, left_s))


@contextmanager
def every_ten_seconds(tick: Callable[[], None]) -> Iterator[None]:
    """Call a function every ten seconds, from a thread: the work may be one long call.

    A first call comes after ten seconds.
    """
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
    """Show progress on the error stream while the work in this context is done.

    In a terminal it is a bar of which nothing is left at the end, however that comes;
    elsewhere a line every ten seconds. Both say about how long the rest takes, once
    that is known.

    Args:
        total: How much work there is, as far as is known at the start.
        titled: Whether the bar has a title.
        lines: Without a terminal, write also a line a result.
        limit_s: What the work may take.
        repeat: When lines are written.
        clock: Seconds, for lines.
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
        expand=True,  # a narrow terminal takes from the text, not from the figures
    )
    task = progress.add_task("", total=total, title="", text="")

    def move(stage: Stage) -> None:
        remaining.at(stage.done, stage.total, title=stage.title)
        progress.update(
            task,
            completed=stage.done,
            total=max(1, stage.total),  # a bar of nothing is drawn full
            title=stage.title,
            text=", ".join(filter(None, (stage.left(remaining), stage.text))),
        )

    with progress:
        yield Show(move)


class ProgressLines:
    """What is known of the work, as lines; with `results`, every result is one, too."""

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
        self._told = False

    def show(self, stage: Stage) -> None:
        """The work is there now."""
        self._remaining.at(stage.done, stage.total, title=stage.title)
        self._at = stage
        if self._results and stage.result:
            self._told = True
            at = f"[{stage.done}/{stage.total}]"
            self._write(f"{at} {stage.text}: {stage.result}")

    def tick(self) -> None:
        """Say where the work is, unless a result has said so since the last time."""
        if not self._told:
            seconds = round(self._clock() - self._start)
            minutes, seconds = divmod(seconds, 60)
            at = self._at
            count = f"{at.done} of {at.total}" if at.total > 1 else ""
            said = at.title, at.text, count, at.left(self._remaining)
            self._write(
                f"mucudnn: {minutes}:{seconds:02d} {', '.join(filter(None, said))}"
            )
        self._told = False

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            self._stream.write(f"{line}\n")
            self._stream.flush()
