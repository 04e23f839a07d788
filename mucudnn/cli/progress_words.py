"""What progress displays say: layers, measurements and training in words."""

import sys
from typing import TYPE_CHECKING

import click

from mucudnn.cli.progress import Show
from mucudnn.report.words import DIRECTIONS, limit_text, speedup_text
from mucudnn.suites import Layer

if TYPE_CHECKING:
    from mucudnn.runtime.training.checkpoints.history import EpochReport, Position
    from mucudnn.runtime.training.log import LogEntry
    from mucudnn.runtime.tuning.table_filler import Measured
    from mucudnn.studies.advance import Advance
    from mucudnn.studies.algorithm_survey import SurveyedLayer
    from mucudnn.studies.outcome import LayerResult

__all__ = ["LayerWords", "TrainingWords"]


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
                f"{_rate(at.images_per_s)}",
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
    parts.append(_rate(report.images_per_s))
    return "  ".join(parts)


def _rate(images_per_s: float) -> str:
    """Two figures of what is slow."""
    digits = 0 if images_per_s >= 10 else 1
    return f"{images_per_s:,.{digits}f} images/s"
