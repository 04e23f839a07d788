"""Progress of long commands: a bar in a terminal, lines elsewhere; time left.

Lines let a log show that work continues. Work of less than ten seconds writes nothing.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

import click

from mucudnn.report.text import DIRECTIONS, limit_text, speedup_text
from mucudnn.runtime.tuning.tables import Measured
from mucudnn.studies.algorithms import SurveyedLayer
from mucudnn.studies.convolutions import LayerProgress, LayerResult
from mucudnn.suites import Layer

if TYPE_CHECKING:
    from mucudnn.runtime.training.history import EpochReport, LogEntry, Position


_EVERY_S = 10.0
_END_S = 1.0  # a blocked error stream must not block the exit

Repeat = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Context manager that calls a function repeatedly."""


class Show:
    """The current part of the work; calling it shows that a part begins or ends.

    Attributes:
        text: Description of the part.
        done: Amount of work done.
        total: Amount of work in total.
        title: Title ahead of a titled bar.
        result: Result of the part, which only lines print.

    Args:
        remaining: Estimate of the remaining time.
        draw: Displays the part whenever it changes.
    """

    text, done, total, title, result = "starting", 0, 1, "", ""

    def __init__(self, remaining: "Remaining", draw: Callable[["Show"], None]) -> None:
        self._remaining = remaining
        self._draw = draw
        self._left_s: float | None = None

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
        """Show the current part.

        `left_s` are the remaining seconds of all work, estimated from the parts so far
        if None.
        """
        self._remaining.at(done, total, title=title)
        self.text, self.title, self.result = text, title, result
        self.done, self.total, self._left_s = done, total, left_s
        self._draw(self)

    @property
    def left(self) -> str:
        """The remaining time in words."""
        left_s = self._remaining.left_s() if self._left_s is None else self._left_s
        return left_text(left_s)


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
    seconds, unless a line of a result was written meanwhile. Both estimate the
    remaining time once possible.

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
        with _bar(total, titled=titled) as draw:
            yield Show(remaining, draw)
        return

    stream, start, just_written = sys.stderr, clock(), False

    def write(line: str) -> None:
        with suppress(OSError, ValueError):  # the stream may be closed
            stream.write(f"{line}\n")
            stream.flush()

    def write_result(at: Show) -> None:
        nonlocal just_written
        if lines and at.result:
            just_written = True
            write(f"[{at.done}/{at.total}] {at.text}: {at.result}")

    def tick() -> None:
        nonlocal just_written
        if not just_written:
            minutes, seconds = divmod(round(clock() - start), 60)
            share = f"{show.done} of {show.total}" if show.total > 1 else ""
            words = ", ".join(filter(None, (show.title, show.text, share, show.left)))
            write(f"mucudnn: {minutes}:{seconds:02d} {words}")
        just_written = False

    show = Show(remaining, write_result)
    with repeat(tick):
        yield show


@contextmanager
def _bar(total: int, *, titled: bool) -> Iterator[Callable[[Show], None]]:
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

    def draw(at: Show) -> None:
        progress.update(
            task,
            completed=at.done,
            total=max(1, at.total),  # an empty bar would be drawn full
            title=at.title,
            text=", ".join(filter(None, (at.left, at.text))),
        )

    with progress:
        yield draw


# Describe progress in words: layers, measurements and training.


class LayerWords:
    """Descriptions of layers and their measurements for a display."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._layer, self._done, self._total = "", 0, 1

    def advance(self, at: LayerProgress[LayerResult]) -> None:
        """Show that a layer begins or has been compared."""
        outcomes = ", ".join(
            f"{speedup_text(o.speedup)} within {limit_text(o.limit)}"
            for o in (at.result.outcomes if at.result else ())
        )
        self.begin(at.layer, at.index, at.total, outcomes)

    def surveyed(self, at: LayerProgress[SurveyedLayer]) -> None:
        """Show that a layer begins or its algorithms are listed."""
        counts = ""
        if at.result is not None:
            batches = at.result.batches
            most = max(len(batch.algorithms) for batch in batches)
            counts = f"up to {most} algorithms at {len(batches)} sizes"
        self.begin(at.layer, at.index, at.total, counts)

    def measured(self, at: Measured) -> None:
        """Show that an algorithm was timed at one size."""
        layer = self._layer or DIRECTIONS[at.problem.direction]  # before any layer
        text = f"{layer}: {at.algo}({at.batch}) {at.done}/{at.total}"
        self._show(text, self._done, self._total)

    def begin(self, layer: Layer, index: int, total: int, result: str = "") -> None:
        """Show that a layer begins, or its result."""
        self._layer = f"{layer.name} {DIRECTIONS[layer.problem.direction]}"
        self._done, self._total = index + bool(result), total
        self._show(self._layer, self._done, total, result=result)


@dataclass(frozen=True, slots=True)
class TrainingWords:
    """Descriptions of training: steps for the display, epochs for the output."""

    show: Show
    epochs: int
    batches: int
    _: KW_ONLY
    steps: int
    quiet: bool

    def measured(self, at: Measured) -> None:
        """Show that a convolution's algorithm was timed before the first step."""
        text = f"{at.algo}({at.batch}) {DIRECTIONS[at.problem.direction]}"
        self.show(text, at.done, at.total, title="measuring")

    def prepared(self, name: str, done: int, total: int) -> None:
        """Show that a node is measured for a plan before the first step."""
        text = f"measuring {name}" if done < total else "planning the step"
        self.show(text, done, total, title="preparing")

    def __call__(self, at: "Position", report: "EpochReport | None") -> None:
        """Show a step, or print a finished epoch."""
        if report is None:
            self.show(
                f"loss {at.mean_loss:.4f}  accuracy {at.accuracy:.2%}  "
                f"{_rate_text(at.images_per_s)}",
                at.batch,
                self.batches,
                title=f"epoch {at.epoch + 1}/{self.epochs}",
                left_s=at.ms / max(1, at.batch) * (self.steps - at.steps) / 1e3,
            )
        elif not self.quiet:
            click.echo(_epoch_line(report, self.epochs))
            sys.stdout.flush()

    def show_test(self, entry: "LogEntry") -> None:
        """Print the results of a test between epochs."""
        if entry.kind == "evaluation" and not self.quiet:
            click.echo(
                f"step {entry.step:,}  test loss {entry.test_loss:.4f}  "
                f"test accuracy {entry.test_accuracy:.2%}"
            )
            sys.stdout.flush()


def _epoch_line(report: "EpochReport", epochs: int) -> str:
    parts = [
        f"epoch {report.epoch + 1}/{epochs}",
        f"loss {report.loss:.4f}",
        f"accuracy {report.accuracy:.2%}",
    ]
    if report.test_accuracy is not None:
        parts.append(f"test accuracy {report.test_accuracy:.2%}")
    parts.append(_rate_text(report.images_per_s))
    return "  ".join(parts)


def _rate_text(images_per_s: float) -> str:
    digits = 0 if images_per_s >= 10 else 1
    return f"{images_per_s:,.{digits}f} images/s"


# Estimate the remaining time of work from the time so far.
#
# Parts of work differ, so the estimate is rounded, and made only after the first part.


_LEAST_S = 3.0
"""Seconds of work below which there is no estimate."""

_STEPS_S = ((55, 10), (3600, 60), (36000, 600), (math.inf, 3600))
"""(below so many seconds, rounded to so many)."""


class Remaining:
    """An estimate of the remaining time of work with countable parts."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        limit_s: float | None = None,
    ) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._start = clock()
        self._of: tuple[str, int] | None = None
        self._first = self._done = 0
        self._since = self._last = self._start

    def at(self, done: int, total: int, *, title: str = "") -> None:
        """Record progress; another title or total starts other work."""
        now = self._clock()
        if self._of != (title, total) or done < self._done:
            self._of, self._first, self._since = (title, total), done, now
            self._last = now
        elif done > self._done:
            self._last = now
        self._done = done

    def left_s(self) -> float | None:
        """Return the remaining seconds; None if unknown."""
        now = self._clock()
        within = None if self._limit_s is None else self._limit_s - (now - self._start)
        parts, took = self._done - self._first, self._last - self._since
        if self._of is None or parts < 1 or took < _LEAST_S:
            return None if within is None else max(0.0, within)
        rest = self._of[1] - self._done
        each = took / parts
        after_this = each * max(0, rest - 1)
        left = max(each * rest - (now - self._last), after_this)
        return left if within is None else max(0.0, min(left, within))


def left_text(seconds: float | None) -> str:
    """Return text such as `about 2 min left`; empty if unknown, or over."""
    if seconds is None or seconds <= 0:
        return ""
    unit = next(unit for below, unit in _STEPS_S if seconds < below)
    whole = max(unit, round(seconds / unit) * unit)
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    parts = ((hours, "h"), (minutes, "min"), (rest, "s"))
    return f"about {' '.join(f'{n} {unit}' for n, unit in parts if n)} left"
