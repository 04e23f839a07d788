"""Log entries of a training, and log files with a line per entry.

A line is written as soon as its entry is available, so a killed run loses at most the
current line. A resumed training repeats some steps; their old lines are removed first.
"""

import csv
import io
import json
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO

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
    """Results of one step, evaluation or epoch; for the numbers see `EpochReport`.

    Attributes:
        kind: `step`, with results of one batch; `evaluation`, with results of the test
            images only; `epoch`, with means over an epoch.
        step: Number of finished steps of the whole training.
        epoch: Current epoch, from 1.
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
        """Return whether a training resumed at `at` does not repeat this entry."""
        if at.batch == 0:
            return self.step <= at.steps
        return self.step < at.steps or (self.step == at.steps and self.kind == STEP)


def step_entry(at: Position, result: StepResult, ms: float) -> LogEntry:
    """Return the entry of the step that ended at a position and took `ms`."""
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
    """Return the entry of an evaluation at a position."""
    return LogEntry(
        EVALUATION,
        at.steps,
        at.epoch + 1,
        test_loss=found.loss,
        test_accuracy=found.accuracy,
    )


def epoch_entry(steps: int, report: EpochReport) -> LogEntry:
    """Return the entry of an epoch that ended after `steps` steps of all."""
    return LogEntry(EPOCH, steps, **{**asdict(report), "epoch": report.epoch + 1})


OnEntry = Callable[[LogEntry], None]
"""Called with every entry."""

_NAMES = tuple(field.name for field in fields(LogEntry))


class LogFile:
    """A log of a training as comma-separated values or JSON lines.

    Numbers that are not finite (a diverged loss) are `nan` or `inf` in CSV and null in
    JSON.

    Args:
        path: File name that ends in .csv, .jsonl or .ndjson.
        since: Position at which training resumes; without it an existing file is
            replaced.

    Raises:
        ValueError: The path has another suffix.
        CheckpointError: Training resumes, and the file is no such log.
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

        On a full disk logging stops with a warning; training continues.
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
        """Close the file."""
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
        whole, _, _ = body.rpartition("\n")  # drop a line cut off by a kill
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
    """A text format of entries.

    Attributes:
        head: Text before the first line.
        line: Entry -> line of text, newline included.
    """

    head: str
    line: Callable[[LogEntry], str]
    entry: Callable[[str], LogEntry]


def _row(values: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


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
    values = json.loads(line)
    return LogEntry(**{name: values[name] for name in _NAMES})


_CSV = _Form(_row(_NAMES), lambda entry: _row(asdict(entry).values()), _csv_entry)
_JSON_LINES = _Form("", _json_line, _json_entry)
_FORMS = {".csv": _CSV, ".jsonl": _JSON_LINES, ".ndjson": _JSON_LINES}
