"""Describe progress in words: layers, measurements and training."""

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
    """Descriptions of layers and their measurements for a display."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._layer, self._done, self._total = "", 0, 1

    def advance(self, at: "Advance[LayerResult]") -> None:
        """Show that a layer begins or has been compared."""
        outcomes = ", ".join(
            f"{speedup_text(o.speedup)} within {limit_text(o.limit)}"
            for o in (at.result.outcomes if at.result else ())
        )
        self._at(at.layer, at.index, at.total, outcomes)

    def surveyed(self, at: "Advance[SurveyedLayer]") -> None:
        """Show that a layer begins or its algorithms are listed."""
        counts = ""
        if at.result is not None:
            batches = at.result.batches
            most = max(len(batch.algorithms) for batch in batches)
            counts = f"up to {most} algorithms at {len(batches)} sizes"
        self._at(at.layer, at.index, at.total, counts)

    def planned(self, layer: Layer, index: int, total: int) -> None:
        """Show that a layer begins that is only planned."""
        self._at(layer, index, total, "")

    def measured(self, at: "Measured") -> None:
        """Show that an algorithm was timed at one size."""
        layer = self._layer or DIRECTIONS[at.problem.direction]  # before any layer
        text = f"{layer}: {at.algo}({at.batch}) {at.done}/{at.total}"
        self._show(text, self._done, self._total)

    def _at(self, layer: Layer, index: int, total: int, result: str) -> None:
        self._layer = f"{layer.name} {DIRECTIONS[layer.problem.direction]}"
        self._done, self._total = index + bool(result), total
        self._show(self._layer, self._done, total, result=result)


class TrainingWords:
    """Descriptions of training: steps for the display, epochs for the output."""

    def __init__(
        self, show: Show, epochs: int, batches: int, *, steps: int, quiet: bool
    ) -> None:
        self._show = show
        self._epochs = epochs
        self._batches = batches
        self._steps = steps
        self._quiet = quiet

    def measured(self, at: "Measured") -> None:
        """Show that a convolution's algorithm was timed before the first step."""
        text = f"{at.algo}({at.batch}) {DIRECTIONS[at.problem.direction]}"
        self._show(text, at.done, at.total, title="measuring")

    def prepared(self, name: str, done: int, total: int) -> None:
        """Show that a node is measured for a plan before the first step."""
        text = f"measuring {name}" if done < total else "planning the step"
        self._show(text, done, total, title="preparing")

    def __call__(self, at: "Position", report: "EpochReport | None") -> None:
        """Show a step, or print a finished epoch."""
        if report is None:
            self._show(
                f"loss {at.mean_loss:.4f}  accuracy {at.accuracy:.2%}  "
                f"{_rate_text(at.images_per_s)}",
                at.batch,
                self._batches,
                title=f"epoch {at.epoch + 1}/{self._epochs}",
                left_s=at.ms / max(1, at.batch) * (self._steps - at.steps) / 1e3,
            )
        elif not self._quiet:
            click.echo(_epoch_line(report, self._epochs))
            sys.stdout.flush()

    def told(self, entry: "LogEntry") -> None:
        """Print the results of a test between epochs."""
        if entry.kind == "evaluation" and not self._quiet:
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
