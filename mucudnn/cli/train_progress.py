"""Where training has got to: its steps on the bar, a line an epoch."""

import sys

import click

from mucudnn.cli.progress import Show
from mucudnn.report.words import DIRECTIONS
from mucudnn.runtime.training.history import EpochReport, Position
from mucudnn.runtime.tuning.sweep import Progress as Measured

__all__ = ["TrainProgress", "report_line"]


class TrainProgress:
    """Puts training into words: a step's for the display, an epoch's on the output.

    Args:
        show: Where a step is shown; it takes titles.
        epochs: How many there will be.
        batches: Steps of one.
        quiet: Write no lines: the output is for data.
    """

    def __init__(self, show: Show, epochs: int, batches: int, *, quiet: bool) -> None:
        self._show = show
        self._epochs = epochs
        self._batches = batches
        self._quiet = quiet

    def measured(self, at: Measured) -> None:
        """Before the first step: a convolution's algorithm was timed."""
        text = f"{at.algo}({at.batch}) {DIRECTIONS[at.problem.direction]}"
        self._show(text, at.done, at.total, title="measuring")

    def prepared(self, name: str, done: int, total: int) -> None:
        """Before the first step: a node is measured for a plan within the budget."""
        if done < total:
            self._show(f"measuring {name}", done, total, title="preparing")
        else:
            self._show("planning the step", done, total, title="preparing")

    def __call__(self, at: Position, report: EpochReport | None) -> None:
        """A step was taken, or an epoch is over."""
        if report is None:
            self._show(
                f"loss {at.mean_loss:.4f}  accuracy {at.accuracy:.2%}  "
                f"{at.images_per_s:,.0f} images/s",
                at.batch,
                self._batches,
                title=f"epoch {at.epoch + 1}/{self._epochs}",
            )
        elif not self._quiet:
            click.echo(report_line(report, self._epochs))
            sys.stdout.flush()


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
