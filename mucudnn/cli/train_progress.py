"""Where training has got to: a bar in a terminal, a line an epoch anywhere else."""

import sys
from types import TracebackType
from typing import Any

import click

from mucudnn.report.words import DIRECTIONS
from mucudnn.runtime.history import EpochReport, Position
from mucudnn.runtime.sweep import Progress as Measured

__all__ = ["TrainDisplay", "report_line"]


class TrainDisplay:
    """Shows training on the error stream, epochs on the output; a context manager.

    Args:
        epochs: How many there will be.
        batches: Steps of one.
        quiet: Write no lines: the output is for data.
    """

    def __init__(self, epochs: int, batches: int, *, quiet: bool) -> None:
        self._epochs = epochs
        self._batches = batches
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "TrainDisplay":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[figures]}", markup=False),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("", total=self._batches, figures="")
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

    def measured(self, at: Measured) -> None:
        """Before the first step: a convolution's algorithm was timed."""
        if self._bar is not None:
            way = DIRECTIONS[at.problem.direction]
            self._bar.update(
                self._task,
                total=at.total,
                completed=at.done,
                description="measuring",
                figures=f"{at.algo}({at.batch}) {way}",
            )

    def __call__(self, at: Position, report: EpochReport | None) -> None:
        """A step was taken, or an epoch is over."""
        if report is not None:
            if not self._quiet:
                click.echo(report_line(report, self._epochs))
                sys.stdout.flush()
        elif self._bar is not None:
            self._bar.update(
                self._task,
                total=self._batches,
                completed=at.batch,
                description=f"epoch {at.epoch + 1}/{self._epochs}",
                figures=f"loss {at.mean_loss:.4f}  accuracy {at.accuracy:.2%}  "
                f"{at.images_per_s:,.0f} images/s",
            )


def report_line(report: EpochReport, epochs: int) -> str:
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
