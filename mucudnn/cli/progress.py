"""How far a long command has got: a bar in a terminal, lines elsewhere.

Whoever reads a log later, or follows it, sees that the work goes on and at what. Work
that takes less than ten seconds writes nothing.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Protocol, TextIO

import click

from mucudnn.cli.remaining import Remaining, left_text
from mucudnn.report.words import DIRECTIONS, limit_text, speedup_text
from mucudnn.suites import Layer

if TYPE_CHECKING:
    from mucudnn.runtime.training.history import EpochReport, Position
    from mucudnn.runtime.training.log import LogEntry
    from mucudnn.runtime.tuning.table_filler import Measured
    from mucudnn.studies.advance import Advance
    from mucudnn.studies.algorithm_survey import SurveyedLayer
    from mucudnn.studies.outcome import LayerResult

__all__ = [
    "LayerWords",
    "ProgressLines",
    "Show",
    "TrainingWords",
    "every_ten_seconds",
    "progress_display",
]

_EVERY_S = 10.0
_END_S = 1.0  # whoever reads the error stream may have stopped

Repeat = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Calls a function again and again within its context."""


class Show(Protocol):
    """Says where the work is."""

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
        """Something begins or is over.

        Args:
            text: What it is.
            done: How much of the work is over.
            total: How much there is.
            title: What it is part of, ahead of a titled bar.
            result: What came of it; only lines say so.
            left_s: Seconds that all of the work will still take, where whoever tells
                knows; otherwise it is estimated from what the parts took.
        """
        ...


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
        yield written.show


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

    def move(
        text: str,
        done: int,
        total: int,
        *,
        title: str = "",
        result: str = "",
        left_s: float | None = None,
    ) -> None:
        most = max(1, total)  # a bar of nothing is drawn full
        remaining.at(done, total, title=title)
        left = left_text(remaining.left_s() if left_s is None else left_s)
        said = ", ".join(filter(None, (left, text)))
        progress.update(task, completed=done, total=most, title=title, text=said)

    with progress:
        yield move


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
        self._left_s: float | None = None
        self._results = results
        self._clock = clock
        self._start = clock()
        self._at = "starting"
        self._told = False

    def show(
        self,
        text: str,
        done: int,
        total: int,
        *,
        title: str = "",
        result: str = "",
        left_s: float | None = None,
    ) -> None:
        """See `Show`."""
        self._remaining.at(done, total, title=title)
        self._left_s = left_s
        self._at = f"{title + ', ' if title else ''}{text}, {done} of {total}"
        if self._results and result:
            self._told = True
            self._write(f"[{done}/{total}] {text}: {result}")

    def tick(self) -> None:
        """Say where the work is, unless a result has said so since the last time."""
        if not self._told:
            seconds = round(self._clock() - self._start)
            minutes, seconds = divmod(seconds, 60)
            left_s = self._left_s
            left = left_text(self._remaining.left_s() if left_s is None else left_s)
            self._write(
                f"mucudnn: {minutes}:{seconds:02d} "
                f"{', '.join(filter(None, (self._at, left)))}"
            )
        self._told = False

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            self._stream.write(f"{line}\n")
            self._stream.flush()


class LayerWords:
    """Puts layers and their measurements into words."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._layer, self._done, self._total = "", 0, 1

    def advance(self, at: "Advance[LayerResult]") -> None:
        """A layer begins or has been compared."""
        outcomes = ", ".join(
            f"{speedup_text(o.speedup)} within {limit_text(o.limit)}"
            for o in (at.result.outcomes if at.result else ())
        )
        self._at(at.layer, at.index, at.total, outcomes)

    def surveyed(self, at: "Advance[SurveyedLayer]") -> None:
        """A layer begins or its algorithms are known."""
        counts = ""
        if at.result is not None:
            batches = at.result.batches
            most = max(len(batch.algorithms) for batch in batches)
            counts = f"up to {most} algorithms at {len(batches)} sizes"
        self._at(at.layer, at.index, at.total, counts)

    def planned(self, layer: Layer, index: int, total: int) -> None:
        """A layer begins, of which nothing but its plan is wanted."""
        self._at(layer, index, total, "")

    def measured(self, at: "Measured") -> None:
        """One algorithm was timed at one size."""
        layer = self._layer or DIRECTIONS[at.problem.direction]  # none has begun yet
        text = f"{layer}: {at.algo}({at.batch}) {at.done}/{at.total}"
        self._show(text, self._done, self._total)

    def _at(self, layer: Layer, index: int, total: int, result: str) -> None:
        self._layer = f"{layer.name} {DIRECTIONS[layer.problem.direction]}"
        self._done, self._total = index + bool(result), total
        self._show(self._layer, self._done, total, result=result)


class TrainingWords:
    """Puts training into words: a step's for the display, an epoch's on the output.

    Args:
        show: The display.
        epochs: In all.
        batches: Of an epoch.
        steps: Of the whole training.
        quiet: No epoch is: the output is for data.
    """

    def __init__(
        self, show: Show, epochs: int, batches: int, *, steps: int, quiet: bool
    ) -> None:
        self._show = show
        self._epochs = epochs
        self._batches = batches
        self._steps = steps
        self._quiet = quiet

    def measured(self, at: "Measured") -> None:
        """Before the first step: a convolution's algorithm was timed."""
        text = f"{at.algo}({at.batch}) {DIRECTIONS[at.problem.direction]}"
        self._show(text, at.done, at.total, title="measuring")

    def prepared(self, name: str, done: int, total: int) -> None:
        """Before the first step: a node is measured for a plan within the budget."""
        text = f"measuring {name}" if done < total else "planning the step"
        self._show(text, done, total, title="preparing")

    def __call__(self, at: "Position", report: "EpochReport | None") -> None:
        """A step was taken, or an epoch is over."""
        if report is None:
            self._show(
                f"loss {at.mean_loss:.4f}  accuracy {at.accuracy:.2%}  "
                f"{at.images_per_s:,.0f} images/s",
                at.batch,
                self._batches,
                title=f"epoch {at.epoch + 1}/{self._epochs}",
                left_s=at.ms / max(1, at.batch) * (self._steps - at.steps) / 1e3,
            )
        elif not self._quiet:
            click.echo(_report_line(report, self._epochs))
            sys.stdout.flush()

    def told(self, entry: "LogEntry") -> None:
        """Between epochs the test images are told of, too."""
        if entry.kind == "evaluation" and not self._quiet:
            click.echo(
                f"step {entry.step:,}  test loss {entry.test_loss:.4f}  "
                f"test accuracy {entry.test_accuracy:.2%}"
            )
            sys.stdout.flush()


def _report_line(report: "EpochReport", epochs: int) -> str:
    """One epoch on one line."""
    parts = [
        f"epoch {report.epoch + 1}/{epochs}",
        f"loss {report.loss:.4f}",
        f"accuracy {report.accuracy:.2%}",
    ]
    if report.test_accuracy is not None:
        parts.append(f"test accuracy {report.test_accuracy:.2%}")
    parts.append(f"{report.images_per_s:,.0f} images/s")
    return "  ".join(parts)
