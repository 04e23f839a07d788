"""What training tells as it goes, and files of it: a line for each thing told.

A line is written as a whole as soon as there is something to tell, so a run that is
killed loses at most the line that was being written. Training that goes on from a
checkpoint takes some steps once more: their lines are cut off before the first new one.
"""

import csv
import io
import json
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

from mucudnn.errors import CheckpointError
from mucudnn.files import write_whole
from mucudnn.runtime.training.checkpoints.history import EpochReport, Position
from mucudnn.runtime.training.evaluation import Evaluation
from mucudnn.runtime.training.step.result import StepResult

__all__ = [
    "EPOCH",
    "EVALUATION",
    "STEP",
    "LogEntry",
    "LogFile",
    "OnEntry",
    "epoch_entry",
    "evaluation_entry",
    "step_entry",
]

STEP, EVALUATION, EPOCH = "step", "evaluation", "epoch"


@dataclass(frozen=True, slots=True)
class LogEntry:
    """What there is to tell after a step.

    Attributes:
        kind: `step`, of which the figures are those of its batch; `evaluation`, with
            figures of the test images only; `epoch`, with the means of an epoch.
        step: Steps of the whole training that are done.
        epoch: The current one, from 1.
        loss: Mean over the labels.
        accuracy: Share of right answers.
        test_loss: Mean over the test images; None where nothing was evaluated.
        test_accuracy: Share of right answers, likewise.
        images_per_s: Training images a second.
        learning_rate: Of the last step.
    """

    kind: str
    step: int
    epoch: int
    loss: float | None = None
    accuracy: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    images_per_s: float | None = None
    learning_rate: float | None = None

    def before(self, at: Position) -> bool:
        """Whether training that goes on from there will not tell it again."""
        if at.batch == 0:
            return self.step <= at.steps
        return self.step < at.steps or (self.step == at.steps and self.kind == STEP)


def step_entry(at: Position, result: StepResult, ms: float) -> LogEntry:
    """What a step found in its batch, and how fast, standing behind it."""
    return LogEntry(
        STEP,
        at.steps,
        at.epoch + 1,
        loss=result.loss,
        accuracy=result.correct / max(1, result.labels),
        images_per_s=result.images / ms * 1e3 if ms else 0.0,
        learning_rate=result.learning_rate,
    )


def evaluation_entry(at: Position, found: Evaluation) -> LogEntry:
    """What the test images say of the weights of this moment."""
    return LogEntry(
        EVALUATION,
        at.steps,
        at.epoch + 1,
        test_loss=found.loss,
        test_accuracy=found.accuracy,
    )


def epoch_entry(steps: int, report: EpochReport) -> LogEntry:
    """What came of an epoch that ended after so many steps of all."""
    return LogEntry(EPOCH, steps, **{**asdict(report), "epoch": report.epoch + 1})


OnEntry = Callable[[LogEntry], None]
"""Called with everything that there is to tell."""

_NAMES = tuple(field.name for field in fields(LogEntry))


class LogFile:
    """A log of training as comma-separated values or as a line of JSON each.

    What is no number (a loss that became infinite) is `nan` or `inf` in the first, and
    null in the second.

    Args:
        path: Ends in .csv, .jsonl or .ndjson.
        since: Where training goes on from; without it a file that is there is replaced.

    Raises:
        ValueError: The path ends in something else.
        CheckpointError: Training goes on, and the file is no such log.
    """

    def __init__(self, path: Path | str, *, since: Position | None = None) -> None:
        self._path = Path(path)
        suffix = self._path.suffix.lower()
        if suffix not in _FORMS:
            raise ValueError(
                f"{path}: a log ends in {', '.join(_FORMS)}; other forms are not known"
            )
        self._form = _FORMS[suffix]
        self._kept = "" if since is None else self._lines_before(since)
        self._file: IO[str] | None = None
        self._failed = False

    def __call__(self, entry: LogEntry) -> None:
        """Write a line.

        A disk that is full costs the log, with a warning, not the training.
        """
        if self._failed:
            return
        try:
            self._opened().write(self._form.line(entry))
            self._opened().flush()
        except OSError as e:
            self._failed = True
            warnings.warn(
                f"cannot write the log {self._path}: {e.strerror or e}; training goes "
                "on without it",
                stacklevel=2,
            )

    def close(self) -> None:
        """Nothing more is told."""
        if self._file is not None and not self._failed:
            self._file.close()

    def _opened(self) -> IO[str]:
        if self._file is None:
            write_whole(self._path, (self._form.head + self._kept).encode())
            self._file = self._path.open("a", encoding="utf-8", newline="")
        return self._file

    def _lines_before(self, since: Position) -> str:
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as e:
            raise CheckpointError(f"cannot go on with the log {self._path}: {e}") from e
        body = text.removeprefix(self._form.head)
        whole, _, _ = body.rpartition("\n")  # behind it is what a kill left of a line
        try:
            entries = [self._form.entry(line) for line in whole.splitlines()]
            kept = [entry for entry in entries if entry.before(since)]
        except (ValueError, TypeError, KeyError) as e:
            raise CheckpointError(
                f"{self._path} is no log of this training: {e}; name another file"
            ) from e
        return "".join(map(self._form.line, kept))


@dataclass(frozen=True, slots=True)
class _Form:
    """How an entry is a line of text.

    Attributes:
        head: What is ahead of all lines.
        line: Entry -> text with the end of a line.
        entry: Text -> entry.
    """

    head: str
    line: Callable[[LogEntry], str]
    entry: Callable[[str], LogEntry]


def _row(values: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _csv_line(entry: LogEntry) -> str:
    return _row(asdict(entry).values())


def _csv_entry(line: str) -> LogEntry:
    (words,) = csv.reader([line])
    kind, step, epoch, *numbers = words
    read = dict(zip(_NAMES[3:], numbers, strict=True))
    figures = {name: float(word) for name, word in read.items() if word}
    return LogEntry(kind, int(step), int(epoch), **figures)


def _json_line(entry: LogEntry) -> str:
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(entry).items()
    }
    return json.dumps(values, allow_nan=False) + "\n"


def _json_entry(line: str) -> LogEntry:
    values: dict[str, Any] = json.loads(line)
    return LogEntry(**{name: values[name] for name in _NAMES})


_CSV = _Form(_row(_NAMES), _csv_line, _csv_entry)
_JSON_LINES = _Form("", _json_line, _json_entry)
_FORMS = {".csv": _CSV, ".jsonl": _JSON_LINES, ".ndjson": _JSON_LINES}
